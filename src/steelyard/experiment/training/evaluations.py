"""Evaluation functions of the user: called with the held-out data and the current model."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinker import types
from torch import Tensor

from steelyard.errors import ConfigError, InputError, SpecError, TermError, TermResultError
from steelyard.experiment.config.reading import import_modules, locate_errors
from steelyard.experiment.config.schema import Config
from steelyard.experiment.config.secrets import resolve_secrets
from steelyard.experiment.config.train_table import EvaluationConfig
from steelyard.experiment.data.source import DataSource
from steelyard.experiment.model.backend import Backend
from steelyard.gradients.parse_result import awaited
from steelyard.spec.error_messages import describe, title
from steelyard.spec.protocol import rejects
from steelyard.spec.registry import build

PREFIX = "eval/"


@dataclass(frozen=True)
class Evaluation:
    """Argument of an evaluation function: the held-out data, and the model as it is now.

    Attributes:
        step: number of the step, from 0.
        data: the held-out data, as the terms get them; empty for a run with rollouts.
        records: the held-out lines of the data file or of the prompts file.
        backend: the model.
        source: the data of the run.
    """

    step: int
    data: Sequence[types.Datum]
    records: Sequence[Mapping[str, Any]]
    backend: Backend = field(repr=False)
    source: DataSource = field(repr=False)

    def logprobs(self, data: Sequence[types.Datum] | None = None) -> list[Tensor]:
        """Log-probs of the target tokens of each datum, `[T]`; of the held-out data if None."""
        return self.backend.logprobs(self.data if data is None else data)

    def sample(
        self,
        prompts: Sequence[str | Mapping[str, Any]],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        """Answer of the current model to each prompt.

        Args:
            prompts: texts, in the format of the data; or lines with `"prompt"` or `"messages"`,
                such as `records`, of which a last message of the assistant is left out.
            max_tokens: maximum tokens of an answer.
            temperature: 0 takes the likeliest token.
            seed: of the answers; the same one gives the same answers of the same model.

        Raises:
            InputError: a prompt is invalid.
        """
        params = self.backend.sampling_params(
            max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        return self.backend.sample([self._encode(prompt) for prompt in prompts], params)

    def _encode(self, prompt: str | Mapping[str, Any]) -> types.ModelInput:
        if isinstance(prompt, str):
            return self.source.prompt(prompt)
        messages = prompt.get("messages")
        if isinstance(messages, list) and messages and messages[-1].get("role") == "assistant":
            prompt = {**prompt, "messages": messages[:-1]}
        try:
            return self.source.open_prompt(prompt)
        except ValueError as error:
            raise InputError(f"{error}.") from error


@dataclass(frozen=True)
class EvaluationFunction:
    """One evaluation function of a run.

    Attributes:
        name: unique among those of the run.
        fn: called as `fn(evaluation, **options)`; may be async.
        options: keyword arguments of each call.
        on_error: whether a failure ends the run, or leaves out its metrics.

    Raises:
        SpecError: `fn` cannot be called with an evaluation and the options.
    """

    name: str
    fn: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    on_error: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        rule = "an evaluation must be a function (evaluation) -> number or {name: number}"
        if not callable(self.fn):
            raise SpecError(f"{rule}, got {self.fn!r} ({self._title}).")
        reason = rejects(self.fn, self.options, positional=1)
        if reason is not None:
            raise SpecError(
                f"{rule} that accepts the options {list(self.options)}: {reason} ({self._title})."
            )

    def metrics(self, evaluation: Evaluation, say: Callable[[str], None]) -> dict[str, float]:
        """Metric `eval/<name>`, or `eval/<name>/<key>` for each number that it returns.

        Args:
            evaluation: passed to the function.
            say: called with the reason why the metrics are left out.

        Raises:
            TermError: the function failed, or returned no numbers, and `on_error` is `"raise"`.
        """
        try:
            returned = self.fn(evaluation, **self.options)
            return self._parse(awaited(returned) if inspect.isawaitable(returned) else returned)
        except Exception as error:
            if self.on_error == "skip":
                say(f"step {evaluation.step}: {self._title} failed: {describe(error)}")
                return {}
            if isinstance(error, TermResultError):
                raise
            raise TermError(f"{self._title} failed: {describe(error)}", term=self.name) from error

    @property
    def _title(self) -> str:
        return title(self.name, "evaluation")

    def _parse(self, returned: Any) -> dict[str, float]:
        if not isinstance(returned, Mapping):
            return {f"{PREFIX}{self.name}": self._number(returned)}
        return {
            f"{PREFIX}{self.name}/{key}": self._number(value) for key, value in returned.items()
        }

    def _number(self, value: Any) -> float:
        number = value.item() if getattr(value, "shape", None) == () else value
        if isinstance(number, int | float):
            return float(number)
        raise TermResultError(
            f"{self._title} must return a number, or a mapping of names to numbers, got "
            f"{value!r:.60} ({type(value).__name__}).",
            term=self.name,
        )


def build_evaluations(config: Config) -> tuple[EvaluationFunction, ...]:
    """Build the evaluation functions of a config, after importing the modules that it lists.

    Raises:
        ConfigError: one cannot be imported or called, a name stands twice, or a metric of
            `train.stop_early` or `train.keep_best` is that of none.
    """
    import_modules(config)
    functions: dict[str, EvaluationFunction] = {}
    for number, entry in enumerate(config.evaluations, 1):
        with locate_errors(f"[[evaluations]] #{number}"):
            function = _build(entry)
            if function.name in functions:
                raise ConfigError(
                    f"name must be unique, and {function.name!r} stands twice: give it another"
                )
            functions[function.name] = function
    for key in ("stop_early", "keep_best"):
        settings = getattr(config.train, key)
        if settings is not None:
            _check_metric(f"[train]: {key}.metric", settings.metric, list(functions))
    return tuple(functions.values())


def _build(entry: EvaluationConfig) -> EvaluationFunction:
    if ":" not in entry.use:
        raise ConfigError(f"use must be 'package.module:attr', got {entry.use!r}")
    fn, options = build(entry.use, resolve_secrets(entry.options))
    name = entry.name or getattr(fn, "name", "") or entry.use.rpartition(":")[2]
    return EvaluationFunction(name, fn, options, entry.on_error)


def _check_metric(key: str, metric: str, names: Sequence[str]) -> None:
    if not metric.startswith(PREFIX) or metric.split("/")[1] in names:
        return
    known = [f"{PREFIX}{name}" for name in names]
    near = difflib.get_close_matches(metric, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(
        f"{key} must be that of an entry of [[evaluations]], here "
        f"{', '.join(known) or 'none'}, got {metric!r}{hint}"
    )
