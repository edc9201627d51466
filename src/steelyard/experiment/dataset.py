"""Dataset of a run: encoded training data, held-out data, and prompts in the same format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tinker import types

from steelyard.errors import DataError
from steelyard.experiment.backend import Backend
from steelyard.experiment.batching import batch, lines_per_step, origins_of, split
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config import Config, DataConfig
from steelyard.experiment.config_train import TrainConfig
from steelyard.experiment.data_fields import check_fields
from steelyard.experiment.data_files import DataFile, Group, Kind, read_records
from steelyard.experiment.encoding import Encoder
from steelyard.experiment.reference_logprobs import FIELD, add_reference_logprobs
from steelyard.experiment.run_dir import RunFolder

CHATS = "prompts are questions in a chat, by the model's template: {}.chat = false for raw text"


@dataclass(frozen=True)
class Dataset:
    """Encoded data of a run.

    Attributes:
        train: data of each line to train on.
        held_out: data to evaluate on.
        kind: format of the lines.
        encoder: tokenizes lines and prompts.
        file: name of the file that `train` comes from.
        lines: numbers of the lines of `train` in the file, from 1.
        held_out_file: name of the file that `held_out` comes from.
        held_out_origins: line and part of each held-out datum, as in `TrainingBatch`.
    """

    train: Sequence[Group]
    held_out: Sequence[types.Datum]
    kind: Kind
    encoder: Encoder
    file: str
    lines: Sequence[int]
    held_out_file: str = ""
    held_out_origins: Sequence[tuple[int, str]] = ()

    def prompt(self, text: str) -> types.ModelInput:
        """Encode a prompt in the format of the data: as a chat, or as plain text."""
        return self.encoder.prompt(text, self.kind)


@dataclass(frozen=True)
class DataFiles:
    """Encoded lines of the data files of a run.

    Attributes:
        encoder: tokenizes lines and prompts.
        main: lines of `data.path`.
        separate: lines of `data.held_out`, if that is a file.
    """

    encoder: Encoder
    main: DataFile
    separate: DataFile | None


def read_data_files(config: Config, terms: Terms, tokenizer: Any) -> DataFiles:
    """Read, check and encode the data files; this needs no model.

    Raises:
        DataError: a line is malformed and `data.skip_bad` is False, or lacks what a term reads.
    """
    settings = cast("DataConfig", config.data)  # this run has one
    encoder = Encoder(tokenizer, settings.max_length, settings.chat)
    given = () if settings.reference == "never" else (FIELD,)

    def read(path: str) -> DataFile:
        file = read_records(path, encoder.encode, skip_bad=settings.skip_bad)
        check_fields(terms, file, path, given)
        return file

    main = read(settings.path)
    separate = read(settings.held_out) if isinstance(settings.held_out, str) else None
    if separate is not None and separate.kind != main.kind:
        raise DataError(
            f"{settings.held_out} must be of one kind with {settings.path}, {main.kind}, "
            f"got {separate.kind}."
        )
    return DataFiles(encoder, main, separate)


def load_dataset(
    config: Config,
    terms: Terms,
    backend: Backend,
    run: RunFolder,
    say: Callable[[str], None],
    files: DataFiles | None = None,
) -> Dataset:
    """Split the data; add reference log-probs if a term reads them.

    Args:
        config: config of the run.
        terms: its terms.
        backend: gives the reference log-probs.
        run: run folder.
        say: receives messages.
        files: the data; None: they are read here.

    Raises:
        DataError: a line is malformed and `data.skip_bad` is False, or lacks what a term reads.
        RunError: a data file has changed since the run began.
    """
    settings = cast("DataConfig", config.data)  # this run has one
    files = files or read_data_files(config, terms, backend.tokenizer)
    encoder, main, separate = files.encoder, files.main, files.separate
    for file in (main, separate):
        if file is not None and file.skipped:
            count = len(file.skipped)
            say(f"{count} bad line{'s' * (count > 1)} left out, the first: {file.skipped[0]}")
    if isinstance(settings.held_out, str) and separate is not None:
        train, held_out = list(main.groups), list(separate.groups)
        lines, held_out_lines = list(main.lines), list(separate.lines)
        held_out_path = settings.held_out
        run.hold_data([settings.path, settings.held_out])
    else:
        seed = config.train.seed if settings.split_seed is None else settings.split_seed
        train, held_out = split(main.groups, settings.held_out, seed)
        lines, held_out_lines = split(main.lines, settings.held_out, seed)
        held_out_path = settings.path
        run.hold_data([settings.path])
    everywhere = settings.reference == "always" or (
        settings.reference == "auto" and terms.reads_reference
    )
    if everywhere or (settings.reference == "auto" and terms.measures_reference):
        used = used_lines(config.train, len(train)) if everywhere else []
        groups = [*(train[i] for i in used), *held_out]
        groups = add_reference_logprobs(groups, backend, run, say)
        for index, group in zip(used, groups, strict=False):
            train[index] = group
        held_out = groups[len(used) :]
    if main.kind == "completion" and encoder.is_chat:
        say(CHATS.format("data"))
    say(f"{len(train)} lines to train on, {len(held_out)} held out")
    data = [datum for group in held_out for datum in group]
    return Dataset(
        train,
        data,
        main.kind,
        encoder,
        Path(settings.path).name,
        lines,
        Path(held_out_path).name,
        origins_of(held_out, held_out_lines),
    )


def used_lines(config: TrainConfig, count: int) -> list[int]:
    """Indices, out of `count`, of the lines that a run trains on in any of its steps."""
    size, seed = lines_per_step(config), config.seed
    steps = min(config.steps, -(-count // size) + 1)  # ceil(count / size) steps see every line
    return sorted({index for step in range(steps) for index in batch(step, size, count, seed)})
