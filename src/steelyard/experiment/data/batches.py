"""Data of a run from files: read, split, with reference log-probs, in batches.

Batches and the held-out split are functions of the seed and the step alone, so a resumed run needs
only its step to continue with the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from tinker import types

from steelyard.errors import ConfigError, DataError
from steelyard.experiment.config.data_tables import DataConfig, sources_of
from steelyard.experiment.config.schema import Config
from steelyard.experiment.config.train_table import TrainConfig
from steelyard.experiment.data.base_model_outputs import FIELD, add_reference_logprobs
from steelyard.experiment.data.encoding import EncodedRecord, Encoder, Group, Kind
from steelyard.experiment.data.files import DataFile, check_fields, read_records, report_skipped
from steelyard.experiment.data.record_sources import Lines, digest_of_lines, file_lines, lines_of
from steelyard.experiment.data.source import PREFERENCE, StepData, TrainingBatch
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.training.held_out import evaluate_held_out
from steelyard.experiment.training.terms import Terms

T = TypeVar("T")


def batch(step: int, size: int, count: int, seed: int) -> list[int]:
    """Indices of the lines of a step, out of `count`; each epoch has its own permutation.

    A batch may end one epoch and begin the next.

    Example:
        >>> [batch(step, size=2, count=4, seed=0) for step in range(3)]
        [[2, 0], [1, 3], [3, 0]]
    """
    # Position p of the endless sequence of lines is entry p mod count of epoch p // count.
    positions = range(step * size, (step + 1) * size)
    orders = {epoch: _order(epoch, count, seed) for epoch in {at // count for at in positions}}
    return [orders[at // count][at % count] for at in positions]


def mixed_batch(
    step: int, size: int, sources: Sequence[int], weights: Sequence[float], seed: int
) -> list[int]:
    """Indices of the items of a step, drawn from several sources by their weights.

    Each source is gone through in epochs, as by `batch`. With one source it is `batch`.

    Args:
        step: number of the step.
        size: number of items.
        sources: number of the source of each item.
        weights: of the sources, by number; one without an item is left out.
        seed: of the order.

    Example:
        >>> drawn = [mixed_batch(step, 2, [0, 0, 1, 1], [3.0, 1.0], 0) for step in range(4)]
        >>> sum(index < 2 for indices in drawn for index in indices)
        5
    """
    items = {source: [i for i, of in enumerate(sources) if of == source] for source in set(sources)}
    if len(items) == 1:
        return batch(step, size, len(sources), seed)
    present = sorted(items)
    shares = np.cumsum([weights[source] for source in present])
    # A prefix of the stream does not depend on its length: a step has the same draws in any run.
    draws = np.random.default_rng([seed, len(sources)]).random((step + 1) * size)
    drawn = np.searchsorted(shares, draws * shares[-1], side="right")
    chosen = []
    for at in range(step * size, (step + 1) * size):
        source = present[drawn[at]]
        before = int((drawn[:at] == drawn[at]).sum())  # items of the source that were drawn before
        chosen.append(items[source][batch(before, 1, len(items[source]), seed)[0]])
    return chosen


def lines_per_step(settings: TrainConfig) -> int:
    """Number of lines before each optimizer step."""
    return settings.batch_size * settings.gradient_accumulation_steps


def split(items: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """Training items and held-out items, each in their given order.

    At least one item is held out and at least one is trained on, unless `fraction` is 0 or there
    is only one item.
    """
    if not fraction or len(items) < 2:  # noqa: PLR2004 - one for each side
        return list(items), []
    count = min(max(1, round(fraction * len(items))), len(items) - 1)
    shuffled = np.random.default_rng([seed, len(items)]).permutation(len(items))
    held_out = set(shuffled[:count].tolist())
    train = [item for index, item in enumerate(items) if index not in held_out]
    return train, [items[index] for index in sorted(held_out)]


def origins_of(
    groups: Sequence[Sequence[types.Datum]], lines: Sequence[int]
) -> list[tuple[int, str]]:
    """Line and part of each datum of these groups, as in `TrainingBatch`."""
    return [
        (line, part)
        for group, line in zip(groups, lines, strict=True)
        for part in (PREFERENCE if len(group) > 1 else ("",))
    ]


@dataclass(frozen=True)
class FixedData:
    """Batches of lines, and their evaluation on the held-out lines.

    Attributes:
        dataset: encoded lines.
        settings: batch size, seed and timeout.
        terms: base loss and regularizers, which are evaluated on held-out lines.
        backend: gives the log-probs for that.
    """

    dataset: Dataset
    settings: TrainConfig
    terms: Terms
    backend: Backend

    def step_data(self, step: int) -> StepData:
        """One batch of the lines of this step."""
        settings = self.settings
        chosen = batch(step, lines_per_step(settings), len(self.dataset.train), settings.seed)
        return StepData([self.batch(chosen)])

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """Training data of the lines with these indices in `dataset.train`."""
        dataset = self.dataset
        groups = [dataset.train[index] for index in indices]
        origins = origins_of(groups, [dataset.lines[index] for index in indices])
        return TrainingBatch([datum for group in groups for datum in group], dataset.file, origins)

    def evaluate(self, step: int) -> dict[str, Any]:  # noqa: ARG002 - the lines are always the same
        """Base loss and value of every term on the held-out lines."""
        dataset = self.dataset
        held_out = TrainingBatch(
            list(dataset.held_out), dataset.held_out_file, dataset.held_out_origins
        )
        return evaluate_held_out(
            self.backend,
            dataset.held_out,
            self.terms,
            self.settings.timeout,
            add_line=held_out.add_line,
            batch=self.settings.batch_size * len(self.dataset.train[0]),  # as in a training step
        )

    def held_out_data(self) -> Sequence[types.Datum]:
        """Data of the held-out lines."""
        return self.dataset.held_out

    def held_out_records(self) -> Sequence[Mapping[str, Any]]:
        """Held-out lines; one for both data of a pair."""
        data = self.dataset.held_out
        records = [datum.record for datum in data if isinstance(datum, EncodedRecord)]
        return records[:: len(self.dataset.train[0])]

    def prompt(self, text: str) -> types.ModelInput:
        """Encode a prompt in the format of the data."""
        return self.dataset.prompt(text)

    def open_prompt(self, record: Mapping[str, Any]) -> types.ModelInput:
        """Encode a line with a prompt, in the format of the data."""
        return self.dataset.encoder.open_prompt(record)

    def with_terms(self, terms: Terms) -> FixedData:
        """Copy of the source that evaluates other terms."""
        return replace(self, terms=terms)


def _order(epoch: int, count: int, seed: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return order


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
        digests: of data that are no file, by the name of their source.
    """

    encoder: Encoder
    main: DataFile
    separate: DataFile | None
    digests: Mapping[str, str] = field(default_factory=dict)


def read_data_files(config: Config, terms: Terms, tokenizer: Any) -> DataFiles:
    """Read, check and encode the data files; this needs no model.

    Raises:
        DataError: a line is malformed and `data.skip_bad` is False, or lacks what a term reads.
    """
    settings = cast("DataConfig", config.data)  # this run has one
    encoder = Encoder(tokenizer, settings.max_length, settings.chat)
    added = () if settings.reference == "never" else (FIELD,)

    def read(lines: Lines) -> DataFile:
        file = read_records(lines, encoder.encode, skip_bad=settings.skip_bad)
        check_fields(terms.readers(), file, lines.title, added)
        return file

    (source,) = sources_of(settings.path)
    if source.is_task:
        raise ConfigError(
            f"[data]: path must be a file or a dataset, got {source.use!r}: tasks are prompts of "
            f"[rollouts]."
        )
    lines = file_lines(source.use) if source.is_file else lines_of(source, "completion", 0)
    main = read(lines)
    separate = None
    if isinstance(settings.held_out, str):
        separate = read(file_lines(settings.held_out))
    if separate is not None and separate.kind != main.kind:
        raise DataError(
            f"{settings.held_out} must be of one kind with {lines.title}, {main.kind}, "
            f"got {separate.kind}."
        )
    return DataFiles(
        encoder, main, separate, {} if source.is_file else {source.use: digest_of_lines(lines)}
    )


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
    (source,) = sources_of(settings.path)
    name = Path(source.use).name if source.is_file else source.use
    for file in (main, separate):
        if file is not None:
            report_skipped(file.skipped, say)
    run.hold_data(config.data_files, files.digests)
    if isinstance(settings.held_out, str) and separate is not None:
        train, held_out = list(main.groups), list(separate.groups)
        lines, held_out_lines = list(main.lines), list(separate.lines)
        held_out_name = Path(settings.held_out).name
    else:
        train, held_out = split(main.groups, settings.held_out, config.split_seed)
        lines, held_out_lines = split(main.lines, settings.held_out, config.split_seed)
        held_out_name = name
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
        name,
        lines,
        held_out_name,
        origins_of(held_out, held_out_lines),
    )


def used_lines(config: TrainConfig, count: int) -> list[int]:
    """Indices, out of `count`, of the lines that a run trains on in any of its steps."""
    size, seed = lines_per_step(config), config.seed
    steps = min(config.steps, -(-count // size) + 1)  # ceil(count / size) steps see every line
    return sorted({index for step in range(steps) for index in batch(step, size, count, seed)})
