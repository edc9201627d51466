"""Dataset of a run: encoded training data, held-out data, and prompts in the same format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tinker import types

from steelyard.errors import DataError
from steelyard.experiment.backend import Backend
from steelyard.experiment.batching import batch, split
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config import Config, DataConfig, TrainConfig
from steelyard.experiment.data_files import DataFile, Group, Kind, read_records
from steelyard.experiment.encoding import Encoder
from steelyard.experiment.reference_logprobs import add_reference_logprobs
from steelyard.experiment.run_dir import RunFolder


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
    """

    train: Sequence[Group]
    held_out: Sequence[types.Datum]
    kind: Kind
    encoder: Encoder
    file: str
    lines: Sequence[int]

    def prompt(self, text: str) -> types.ModelInput:
        """Encode a prompt in the format of the data: as a chat, or as plain text."""
        return self.encoder.prompt(text, self.kind)


def load_dataset(
    config: Config, terms: Terms, backend: Backend, run: RunFolder, say: Callable[[str], None]
) -> Dataset:
    """Read, check and encode the data; add reference log-probs if a term reads them.

    Raises:
        DataError: a line is malformed and `data.skip_bad` is False.
        RunError: a data file has changed since the run began.
    """
    settings = cast("DataConfig", config.data)  # this run has one
    encoder = Encoder(backend.tokenizer, settings.max_length)
    main = _read(settings.path, encoder, skip_bad=settings.skip_bad, say=say)
    if isinstance(settings.held_out, str):
        separate = _read(settings.held_out, encoder, skip_bad=settings.skip_bad, say=say)
        if separate.kind != main.kind:
            raise DataError(
                f"{settings.held_out} must be of one kind with {settings.path}, {main.kind}, "
                f"got {separate.kind}."
            )
        train, held_out = list(main.groups), list(separate.groups)
        lines = list(main.lines)
        run.hold_data([settings.path, settings.held_out])
    else:
        seed = config.train.seed if settings.split_seed is None else settings.split_seed
        train, held_out = split(main.groups, settings.held_out, seed)
        lines, _ = split(main.lines, settings.held_out, seed)
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
    say(f"{len(train)} lines to train on, {len(held_out)} held out")
    data = [datum for group in held_out for datum in group]
    return Dataset(train, data, main.kind, encoder, Path(settings.path).name, lines)


def used_lines(config: TrainConfig, count: int) -> list[int]:
    """Indices, out of `count`, of the lines that a run trains on in any of its steps."""
    size, seed = config.batch_size, config.seed
    steps = min(config.steps, -(-count // size) + 1)  # ceil(count / size) steps see every line
    return sorted({index for step in range(steps) for index in batch(step, size, count, seed)})


def _read(path: str, encoder: Encoder, *, skip_bad: bool, say: Callable[[str], None]) -> DataFile:
    file = read_records(path, encoder.encode, skip_bad=skip_bad)
    if file.skipped:
        count = len(file.skipped)
        say(f"{count} bad line{'s' * (count > 1)} left out, the first: {file.skipped[0]}")
    return file
