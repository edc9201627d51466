"""The model that a run has trained: open it at a checkpoint, sample from it, chat, export it."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from tinker import types

from steelyard.errors import ConfigError, InputError, RunError
from steelyard.experiment.config.data_tables import DataConfig, sources_of
from steelyard.experiment.config.schema import Config, ModelConfig
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.files import parse_lines, parse_prompt
from steelyard.experiment.model.backend import (
    Backend,
    check_model,
    check_service,
    convert_tinker_errors,
    open_backend,
    sample_from,
    with_named_address,
)
from steelyard.experiment.run.checkpoints import RunCheckpoint, find_checkpoint, with_checkpoint
from steelyard.experiment.run.folder import RunFolder

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class SampledText:
    """One answer to a prompt.

    Attributes:
        text: without special tokens.
        stop_reason: `"stop"` at an end token, `"length"` at the maximum of tokens.
        tokens: their number.
    """

    text: str
    stop_reason: str
    tokens: int


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run at a checkpoint, and the base model beside it; a context manager.

    Prompts are `{"prompt": text}`, raw text, or `{"messages": [...]}`, which needs a chat template.

    Attributes:
        backend: has the checkpoint's weights.
        checkpoint: the record of the checkpoint.
        config: config of the run.
        is_finished: whether the run has made all its steps.
    """

    backend: Backend
    checkpoint: RunCheckpoint
    config: Config
    is_finished: bool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()

    @property
    def has_chat_template(self) -> bool:
        """Return whether the base model's tokenizer has a chat template."""
        return bool(self.backend.tokenizer.chat_template)

    @cached_property
    def is_chat(self) -> bool:
        """Return whether a text is a message of a chat, as in the training data; False: plain text.

        If the data are gone, a model with a chat template counts as trained on chats.
        """
        return self.has_chat_template and _trained_on_chats(self.config) is not False

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and answer; None if the service does not say."""
        return self.backend.context_length

    def encode(self, prompt: Mapping[str, Any]) -> types.ModelInput:
        """Encode a prompt.

        Raises:
            InputError: it is invalid, or the model has no chat template and it needs one.
        """
        try:
            return Encoder(self.backend.tokenizer, 0, chat=False).open_prompt(prompt)
        except ValueError as error:
            raise InputError(f"{error}.") from error

    def params(
        self,
        *,
        max_tokens: int = 256,
        temperature: float = 0.7,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> types.SamplingParams:
        """Settings of a sampling call; an answer also ends at the tokenizer's end token."""
        return self.backend.sampling_params(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
        )

    def sample(
        self,
        prompts: Sequence[Mapping[str, Any]],
        params: types.SamplingParams,
        *,
        count: int = 1,
        base: bool = False,
    ) -> list[list[SampledText]]:
        """Sample `count` answers to each prompt, from the trained model or from the base model.

        Raises:
            InputError: a prompt or a setting breaks a rule.
            RunError: the Tinker service fails.
        """
        requests = [(self.encode(prompt), count, params) for prompt in prompts]
        with convert_tinker_errors("sample from the checkpoint"):
            groups = sample_from(self._sampling(base=base), requests)
        return [[self._sampled_text(sequence) for sequence in group] for group in groups]

    def stream(
        self, prompt: types.ModelInput, params: types.SamplingParams, *, base: bool = False
    ) -> Iterator[str]:
        """Sample one answer, and yield its text as it is written; a service's in one piece.

        Raises:
            InputError: the prompt or a setting breaks a rule.
            RunError: the Tinker service fails.
        """
        sampling = self._sampling(base=base)
        if hasattr(sampling, "stream"):
            return self._decode(sampling.stream(prompt, params))
        with convert_tinker_errors("sample from the checkpoint"):
            ((sequence,),) = sample_from(sampling, [(prompt, 1, params)])
        return iter([self._sampled_text(sequence).text])

    def _sampling(self, *, base: bool) -> Any:
        return self._base_sampling if base else self._trained_sampling

    @cached_property
    def _trained_sampling(self) -> Any:
        return self.backend.client.save_weights_and_get_sampling_client()

    @cached_property
    def _base_sampling(self) -> Any:
        return self.backend.service.create_sampling_client(base_model=self.config.model.base_model)

    def _sampled_text(self, sequence: types.SampledSequence) -> SampledText:
        text = self._text(sequence.tokens)
        return SampledText(text, sequence.stop_reason, len(sequence.tokens))

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.backend.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _decode(self, tokens: Iterable[int]) -> Iterator[str]:
        # A token alone does not decode as it does within a text, so all are decoded each time: next
        # to the model's pass that costs nothing. An incomplete character waits for its other bytes.
        seen: list[int] = []
        shown = text = ""
        for token in tokens:
            seen.append(token)
            text = self._text(seen)
            if not text.endswith(_INCOMPLETE):
                yield text[len(shown) :]
                shown = text
        yield text[len(shown) :]


def open_trained_model(
    folder: str | Path,
    step: int | Literal["best"] | None = None,
    *,
    base_url: str | None = None,
) -> TrainedModel:
    """Open the model of a run, also of one that still runs.

    Args:
        folder: run folder.
        step: number of steps after which the checkpoint was saved; `"best"`: see
            `train.keep_best`; None: the newest one.
        base_url: as in `resume`.

    Raises:
        RunError: there is no such run or checkpoint, its base model is gone, its config names a
            Tinker service that the user has not, or the service fails.
        CheckpointError: the checkpoint is damaged.
    """
    run = RunFolder(folder)
    config = with_named_address(run.config(), base_url, run.path)
    check_base_model(run, config.model)
    check_service(config.model)
    model, seed = _for_this_machine(config.model), config.train.seed
    backend, checkpoint = with_checkpoint(
        run,
        step,
        lambda checkpoint: open_backend(model, seed, run.checkpoints, path=checkpoint.path),
    )
    return TrainedModel(backend, checkpoint, config, run.result() is not None)


def export_run(
    folder: str | Path,
    target: str | Path,
    *,
    merge: bool = False,
    step: int | Literal["best"] | None = None,
    dtype: str | None = None,
) -> tuple[Path, RunCheckpoint]:
    """Write the model of a run into a new folder, as an adapter or as a whole model, with a card.

    Args:
        folder: run folder; the run need not be finished.
        target: folder to write; new or empty.
        merge: add the adapter to the base model's weights, and write a whole model.
        step: number of steps after which the checkpoint was saved; `"best"`: see
            `train.keep_best`; None: the newest one.
        dtype: of the weights of a whole model; None: the one that the run has here.

    Returns:
        The folder that was written, and the checkpoint in it.

    Raises:
        RunError: there is no such run or checkpoint, its base model is gone, or the checkpoint is
            on a Tinker service.
        CheckpointError: the checkpoint is damaged.
        InputError: the target is not empty or cannot be written, or the dtype is unknown.
    """
    from steelyard.engine.model_export import export_checkpoint  # noqa: PLC0415 - takes seconds
    from steelyard.experiment.model.model_card import model_card  # noqa: PLC0415 - as above

    run = RunFolder(folder)
    config = run.config()
    if config.model.backend == "tinker":
        checkpoint = find_checkpoint(run, step)
        raise RunError(
            f"{run.path} must be a run on this machine, and its weights are on a Tinker service: "
            f"get them with 'tinker checkpoint download {checkpoint.path} -o {target}'."
        )
    check_base_model(run, config.model)
    return with_checkpoint(
        run,
        step,
        lambda checkpoint: export_checkpoint(
            run.checkpoints,
            checkpoint.path,
            target,
            merge=merge,
            device=config.model.device,
            dtype=dtype or config.model.dtype,
            card=model_card(run, checkpoint, merge=merge),
        ),
    )


def check_base_model(run: RunFolder, config: ModelConfig) -> None:
    """Check that the base model of a run still exists, as far as that takes no download.

    Raises:
        RunError: it is gone.
    """
    try:
        check_model(config.model_copy(update={"device": None}))  # it may be opened on another one
    except ConfigError as error:
        raise RunError(
            f"{run.path} was trained on the model {config.base_model!r}, and it is not there any "
            f"more: put it back, or, if that is a relative path, work in the folder where the run "
            f"was started."
        ) from error


def read_open_prompts(
    path: str | Path, *, skip_bad: bool = False
) -> tuple[list[Mapping[str, Any] | str], list[str]]:
    """Read prompts from a file: JSON Lines if its first line begins with `{`, else plain texts.

    Returns:
        A text or an object with `"prompt"` or `"messages"` for each line that is not empty, and an
        error for each skipped line.

    Raises:
        DataError: a line is invalid and `skip_bad` is False, or no valid line is left.
    """
    is_json: list[bool] = []

    def parse(_: int, line: str) -> Mapping[str, Any] | str:
        is_json.append(line.startswith("{"))
        return parse_prompt(line) if is_json[0] else line

    parsed, errors = parse_lines(path, parse, skip_bad=skip_bad)
    return list(parsed.values()), errors


def _for_this_machine(config: ModelConfig) -> ModelConfig:
    """Settings of a model that was trained on a GPU, for a machine that may have none."""
    if (config.device or "").startswith("cuda") and not torch.cuda.is_available():
        return config.model_copy(update={"device": None})
    return config


def _trained_on_chats(config: Config) -> bool | None:
    """Return whether the first line of a run's data is a chat; None if it cannot be read."""
    source = config.source
    try:
        given = source.path if isinstance(source, DataConfig) else source.prompts
        first = sources_of(given)[0]
        if first.is_task:
            return source.chat is not False
        path = Path(first.use)
        if not path.is_file():  # gone, or a pipe or a device, which would never end
            return None
        with path.open(encoding="utf-8-sig") as file:
            record = json.loads(next(line for line in file if line.strip()))
        is_chat = source.chat is not False and "prompt" in record
        return "messages" in record or isinstance(record.get("chosen"), list) or is_chat
    except (OSError, ValueError, StopIteration, AttributeError, TypeError, RecursionError):
        return None


class Chat:
    """Messages so far, each answered in the light of those before it.

    A model without a chat template continues each text by itself, and nothing is remembered.

    Args:
        model: the model of a run.
        params: settings of the answers.
        system: the system message.
        base: whether the base model answers.
    """

    def __init__(
        self,
        model: TrainedModel,
        params: types.SamplingParams,
        *,
        system: str | None = None,
        base: bool = False,
    ) -> None:
        self._model, self._params, self._base = model, params, base
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._exchanges: list[list[dict[str, str]]] = []

    def answer(self, text: str) -> Generator[str]:
        """Yield the answer to a text, piece by piece; a part of it is remembered if it is closed.

        If the context is full, the oldest exchanges are forgotten.

        Raises:
            InputError: the text does not fit the model's context, or a setting breaks a rule.
        """
        prompt = self._fitting_prompt(text)
        answer: list[str] = []
        stream = self._model.stream(prompt, self._params, base=self._base)
        try:
            for piece in stream:
                answer.append(piece)
                yield piece
        finally:
            question = {"role": "user", "content": text}
            self._exchanges.append([question, {"role": "assistant", "content": "".join(answer)}])

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self._exchanges = []

    def _fitting_prompt(self, text: str) -> types.ModelInput:
        context = self._model.context_length
        while True:
            prompt = self._model.encode(self._record(text))
            if context is None or not self._exchanges:
                return prompt
            # Half of the context is enough for an answer, whatever its limit.
            if prompt.length + min(self._params.max_tokens or context, context // 2) <= context:
                return prompt
            del self._exchanges[0]

    def _record(self, text: str) -> Mapping[str, Any]:
        if not self._system and not self._model.has_chat_template:
            return {"prompt": text}
        said = [message for exchange in self._exchanges for message in exchange]
        return {"messages": [*self._system, *said, {"role": "user", "content": text}]}
