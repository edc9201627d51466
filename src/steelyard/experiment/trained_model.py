"""The model that a run has trained, opened at one of its checkpoints to sample from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from tinker import types

from steelyard.errors import ConfigError, InputError, RunError
from steelyard.experiment.backend import (
    Backend,
    check_model,
    check_service,
    convert_tinker_errors,
    open_backend,
    sample_from,
)
from steelyard.experiment.checkpointing import RunCheckpoint, with_checkpoint
from steelyard.experiment.config import Config, DataConfig, ModelConfig
from steelyard.experiment.data_files import parse_lines, parse_prompt
from steelyard.experiment.encoding import Encoder
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.service_address import with_named_address

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
        """True if the base model's tokenizer has a chat template."""
        return bool(self.backend.tokenizer.chat_template)

    @cached_property
    def is_chat(self) -> bool:
        """True if a text is a message of a chat, as in the training data; False: plain text.

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
        end = self.backend.tokenizer.eos_token_id
        return types.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=None if end is None else [end],
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
        run, step, lambda found: open_backend(model, seed, run.checkpoints, path=found.path)
    )
    return TrainedModel(backend, checkpoint, config, run.result() is not None)


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
        if not is_json:
            is_json.append(line.startswith("{"))
        if not is_json[0]:
            return line
        return parse_prompt(line)

    parsed, errors = parse_lines(path, parse, skip_bad=skip_bad)
    return list(parsed.values()), errors


def _for_this_machine(config: ModelConfig) -> ModelConfig:
    """Settings of a model that was trained on a GPU, for a machine that may have none."""
    if (config.device or "").startswith("cuda") and not torch.cuda.is_available():
        return config.model_copy(update={"device": None})
    return config


def _trained_on_chats(config: Config) -> bool | None:
    """Whether the first line of a run's data is a chat; None if it cannot be read."""
    source = config.source
    try:
        with Path(source.path if isinstance(source, DataConfig) else source.prompts).open(
            encoding="utf-8-sig"
        ) as file:
            record = json.loads(next(line for line in file if line.strip()))
        is_chat = source.chat is not False and "prompt" in record
        return "messages" in record or isinstance(record.get("chosen"), list) or is_chat
    except (OSError, ValueError, StopIteration, AttributeError, TypeError):
        return None
