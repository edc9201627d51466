"""A run: from a config to a trained adapter, step by step, and on from where it was."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from tinker import types

from steelyard.experiment import checkpointing, held_out
from steelyard.experiment.backend import Backend, check_model, open_backend
from steelyard.experiment.batching import batch
from steelyard.experiment.build_terms import Terms, build_terms
from steelyard.experiment.config import Config
from steelyard.experiment.config_weights import schedule_of
from steelyard.experiment.dataset import Dataset, gather
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.sinks import Sinks
from steelyard.experiment.step_metrics import reasons
from steelyard.spec import Schedule


class Watcher(Protocol):
    """Somebody who looks on while a run goes."""

    def say(self, text: str) -> None:
        """Something worth a line has happened."""

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """A step was made; `metrics` is its line in `metrics.jsonl`."""


class Unwatched:
    """Nobody looks on."""

    def say(self, text: str) -> None:
        """Nothing."""

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: `"done"`, or `"interrupted"`: it was asked to stop, and can go on.
        folder: where it is.
        steps: how many steps were made, in all.
        metrics: the last line of its metrics.
    """

    status: Literal["done", "interrupted"]
    folder: Path
    steps: int
    metrics: dict[str, Any]


def train(
    config: Config,
    folder: str | Path,
    *,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run an experiment in a fresh folder.

    Args:
        config: what to run.
        folder: where its files go.
        watch: who is told of each step.
        stop: asked before each step; when it says True the run saves and ends.

    Raises:
        ConfigError: the config names something that is not there.
        DataError: a line of the data is malformed.
        RunError: the folder is in use, or holds a run.
        TermError: the base loss or a term failed.
        CheckpointError: the run could not be saved; older checkpoints are as they were.
    """
    check_model(config.model)
    run, terms = RunFolder(folder), build_terms(config)
    with run.locked():
        run.begin(config)
        return _logged(run, lambda: _Run(run, config, terms, watch or Unwatched(), stop).go())


def resume(
    folder: str | Path,
    *,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Go on with a run from its last checkpoint, to the same bits as if it had not been stopped.

    Raises:
        RunError: there is no run, or it is under way.
        CheckpointError: its last checkpoint is damaged.
    """
    run = RunFolder(folder)
    config = run.config()
    terms = build_terms(config)
    with run.locked():
        return _logged(run, lambda: _Run(run, config, terms, watch or Unwatched(), stop).go())


@dataclass
class _Run:
    run: RunFolder
    config: Config
    terms: Terms
    watch: Watcher
    stop: Callable[[], bool]

    def go(self) -> Outcome:
        done = self.run.result()
        if done is not None:
            return self._outcome("done")
        with _warnings_to(self._say):
            backend = self._open()
            try:
                return self._train(backend)
            finally:
                self.terms.close()
                backend.close()

    def _open(self) -> Backend:
        self._say(f"loading {self.config.model.base_model} ({self.config.model.backend})")
        return open_backend(self.config.model, self.config.train.seed, self.run.checkpoints)

    def _train(self, backend: Backend) -> Outcome:
        settings = self.config.train
        material = gather(self.config, self.terms, backend, self.run, self._say)
        saved = checkpointing.last_saved(self.run)
        start = 0 if saved is None else saved.step
        self.run.cut(0 if saved is None else saved.metrics_bytes)
        if not start:
            self._sample(backend, material, "before", 0)
        if saved is not None:
            checkpointing.load(backend.client, saved)
            self._say(f"going on after step {start} of {settings.steps}")
        sinks = Sinks(self.config, self.run, start)
        try:
            unsaved = False
            for step in range(start, settings.steps):
                if self.stop():
                    if unsaved:
                        self._save(backend, step)
                    return self._outcome("interrupted")
                metrics = self._step(backend, material, step)
                self.run.append(metrics)
                if sinks.any:
                    sinks.write(step, metrics)
                self.watch.step(step, settings.steps, metrics)
                made = step + 1
                unsaved = not (settings.save_every and made % settings.save_every == 0)
                if not unsaved or made == settings.steps:
                    self._save(backend, made)
        finally:
            sinks.close()
        self._sample(backend, material, "after", settings.steps)
        return self._finished()

    def _step(self, backend: Backend, material: Dataset, step: int) -> dict[str, Any]:
        settings, client = self.config.train, backend.client
        began, clock = time.time(), time.perf_counter()
        _seed(settings.seed, step)
        measured: dict[str, float] = {}
        if step == 0 and settings.steps > 1:
            measured = self._measured(backend, material)
        chosen = batch(step, settings.batch_size, len(material.train), settings.seed)
        data = [datum for index in chosen for datum in material.train[index]]
        output = client.forward_backward_custom(
            data,
            self.terms.loss,
            regularizers=self.terms.specs,
            track_grad_norms=settings.track_grad_norms,
            timeout=settings.timeout,
            step=step,
        ).result()
        for name, reason in output.skipped.items():
            self._say(f"step {step}: {name} was skipped: {reason}")
        optim = client.optim_step(self._adam(step)).result()
        if self._due(step):
            measured = self._measured(backend, material)
        return {
            "step": step,
            "time": began,
            "seconds": time.perf_counter() - clock,
            **output.metrics,
            **(reasons(output.skipped) if output.skipped else {}),
            **{f"optim/{key}": value for key, value in (optim.metrics or {}).items()},
            **measured,
        }

    @cached_property
    def _rate(self) -> float | Schedule:
        return schedule_of(self.config.train.learning_rate)

    def _adam(self, step: int) -> types.AdamParams:
        settings = self.config.train
        rate = self._rate
        return types.AdamParams(
            learning_rate=rate(step) if callable(rate) else rate,
            grad_clip_norm=settings.grad_clip_norm,
            weight_decay=settings.weight_decay,
        )

    def _due(self, step: int) -> bool:
        settings = self.config.train
        every = settings.evaluate_every
        return step + 1 == settings.steps or bool(step and every and step % every == 0)

    def _measured(self, backend: Backend, material: Dataset) -> dict[str, float]:
        return held_out.measure(backend, material.held_out, self.terms, self.config.train.timeout)

    def _save(self, backend: Backend, made: int) -> None:
        settings = self.config.train
        checkpointing.save(backend.client, self.run, made, settings.seed, settings.keep)

    def _sample(
        self, backend: Backend, material: Dataset, when: Literal["before", "after"], step: int
    ) -> None:
        prompts = self.config.train.sample_prompts
        others = [sample for sample in self.run.samples() if sample["when"] != when]
        if when == "before" and len(others) < len(self.run.samples()):
            return
        asked = [material.prompt(prompt) for prompt in prompts]
        answers = backend.sample(asked, self.config.train.sample_tokens) if prompts else []
        fresh = [
            {"when": when, "step": step, "prompt": prompt, "completion": answer}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        self.run.keep_samples([*others, *fresh])

    def _finished(self) -> Outcome:
        outcome = self._outcome("done")
        lines = self.run.metrics()
        result = {
            "status": "done",
            "steps": outcome.steps,
            "seconds": sum(line["seconds"] for line in lines),
            "metrics": outcome.metrics,
        }
        self.run.finish(result)
        self._say(f"done after {outcome.steps} steps")
        return outcome

    def _outcome(self, status: Literal["done", "interrupted"]) -> Outcome:
        lines = self.run.metrics()
        return Outcome(status, self.run.path, len(lines), lines[-1] if lines else {})

    def _say(self, text: str) -> None:
        self.run.log(text)
        self.watch.say(text)


def _seed(seed: int, step: int) -> None:
    """Make whatever a term draws at random a function of the seed and the step."""
    drawn = np.random.SeedSequence([seed, step]).generate_state(3)
    random.seed(int(drawn[0]))
    np.random.seed(int(drawn[1]))  # noqa: NPY002 - terms may use the global one
    torch.manual_seed(int(drawn[2]))


def _logged(run: RunFolder, go: Callable[[], Outcome]) -> Outcome:
    try:
        return go()
    except Exception as error:
        run.log(f"failed: {type(error).__name__}: {error}")
        raise


@contextmanager
def _warnings_to(say: Callable[[str], None]) -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        say(f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
