"""Data of a term's own in a run: read, split, with the base model's answers and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinker import types

from steelyard.composition.call_seeds import CallSeed
from steelyard.errors import DataError
from steelyard.experiment.config.data_tables import DataConfig, TermDataConfig
from steelyard.experiment.config.schema import Config
from steelyard.experiment.data.base_model_outputs import (
    FIELD,
    add_base_answers,
    add_reference_logprobs,
)
from steelyard.experiment.data.batches import origins_of, split
from steelyard.experiment.data.encoding import Encoder, Group
from steelyard.experiment.data.files import DataFile, check_fields, read_records, report_skipped
from steelyard.experiment.data.source import TrainingBatch
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.training.terms import Terms
from steelyard.spec.regularizer import RegularizerSpec

_MAX_LENGTH: int = DataConfig.model_fields["max_length"].default


@dataclass(frozen=True)
class TermData:
    """Data that one term reads in place of the batch.

    Attributes:
        train: data of each line, of which a call has some.
        held_out: data to measure the term on.
        origins: file, line and part of the line of each datum, by its identity.
    """

    train: Sequence[Group]
    held_out: Sequence[types.Datum]
    origins: Mapping[int, tuple[str, int, str]]

    @property
    def items(self) -> list[Any]:
        """Value of the `data` of the term's spec: a datum for each line, or a list of several."""
        return [group[0] if len(group) == 1 else group for group in self.train]

    def batch(self, data: Sequence[types.Datum]) -> TrainingBatch:
        """Some of these data, all from one file, with the lines that they come from."""
        origins = [self.origins[id(datum)] for datum in data]
        file = origins[0][0] if origins else ""
        return TrainingBatch(list(data), file, [(line, part) for _, line, part in origins])


@dataclass(frozen=True)
class TermFile:
    """Encoded lines of the files of a term, before the model is loaded.

    Attributes:
        settings: of the data.
        max_length: maximum tokens of an example.
        main: lines of `path`.
        separate: lines of `held_out`, if that is a file.
    """

    settings: TermDataConfig
    max_length: int
    main: DataFile
    separate: DataFile | None


def read_term_files(config: Config, terms: Terms, tokenizer: Any) -> dict[str, TermFile]:
    """Read, check and encode the files of the terms with data of their own, by name of the term.

    This needs no model.

    Raises:
        DataError: a line is malformed and is not to be skipped, or lacks what the term reads.
    """
    files: dict[str, TermFile] = {}
    known: dict[str, TermFile] = {}  # several terms may read one file
    for spec, entry in zip(terms.specs, config.regularizers, strict=True):
        if entry.data is None:
            continue
        key = entry.data.model_dump_json()
        if key not in known:
            known[key] = _read_file(config, entry.data, tokenizer)
        files[spec.name] = file = known[key]
        for lines, path in ((file.main, entry.data.path), (file.separate, entry.data.held_out)):
            if lines is not None:
                check_fields(terms.readers(spec.name), lines, str(path), (FIELD,))
    return files


def _read_file(config: Config, data: TermDataConfig, tokenizer: Any) -> TermFile:
    source = config.source
    max_length = data.max_length or (config.data.max_length if config.data else _MAX_LENGTH)
    encoder = Encoder(tokenizer, max_length, source.chat if data.chat is None else data.chat)
    skip_bad = source.skip_bad if data.skip_bad is None else data.skip_bad

    def read(path: str) -> DataFile:
        return read_records(path, encoder.encode, skip_bad=skip_bad, prompts=True)

    main = read(data.path)
    separate = read(data.held_out) if isinstance(data.held_out, str) else None
    if separate is not None and (separate.kind == "preference") != (main.kind == "preference"):
        raise DataError(
            f"{data.held_out} must be of one kind with {data.path}, {main.kind}, "
            f"got {separate.kind}."
        )
    return TermFile(data, max_length, main, separate)


def load_term_data(
    config: Config,
    terms: Terms,
    backend: Backend,
    run: RunFolder,
    say: Callable[[str], None],
    files: Mapping[str, TermFile] | None = None,
) -> Terms:
    """Terms with their own data: split, and with what the base model has to add to them.

    Args:
        config: config of the run.
        terms: its terms.
        backend: gives the base model's answers and log-probs; its client must be untrained.
        run: run folder.
        say: receives messages.
        files: the lines; None: they are read here.

    Raises:
        DataError: as `read_term_files`, or the base model has answered no prompt.
        RunError: a file has changed since the run began.
    """
    if not terms.with_own_data:
        return terms
    files = files or read_term_files(config, terms, backend.tokenizer)
    run.hold_data(config.data_files)
    loading = _Loading(config, terms, backend, run, say)
    answered: dict[int, _Lines] = {}  # by identity of the files
    data = {}
    for spec in terms.specs:
        if spec.name not in files:
            continue
        file = files[spec.name]
        if id(file) not in answered:
            answered[id(file)] = loading.lines(file)
        data[spec.name] = loading.data(spec, answered[id(file)])
        count, held_out = len(data[spec.name].train), len(data[spec.name].held_out)
        say(
            f"{spec.name}: {min(spec.per_step, count)} of {count} lines of "
            f"{Path(file.settings.path).name} beside each batch, {held_out} held out"
        )
    return terms.with_data(data)


@dataclass(frozen=True)
class _Lines:
    """Answered lines of a term: groups, numbers of the lines and file names, of both parts."""

    train: list[Group]
    train_lines: list[int]
    file: str
    held_out: list[Group]
    held_out_lines: list[int]
    held_out_file: str


@dataclass(frozen=True)
class _Loading:
    """Loads the data of terms with the base model of a run."""

    config: Config
    terms: Terms
    backend: Backend
    run: RunFolder
    say: Callable[[str], None]

    def lines(self, file: TermFile) -> _Lines:
        """Lines to train on and to hold out."""
        groups, numbers = self._answered(file, file.main, file.settings.path)
        name, fraction = Path(file.settings.path).name, file.settings.held_out
        if file.separate is not None:
            held_out, lines = self._answered(file, file.separate, str(fraction))
            return _Lines(groups, numbers, name, held_out, lines, Path(str(fraction)).name)
        seed = self.config.split_seed
        (train, held_out), (of_train, of_held_out) = (
            split(groups, fraction, seed),
            split(numbers, fraction, seed),
        )
        return _Lines(train, of_train, name, held_out, of_held_out, name)

    def _answered(
        self, file: TermFile, lines: DataFile, path: str
    ) -> tuple[list[Group], list[int]]:
        """Data of each line, and its number, without prompts that have no answer."""
        report_skipped(lines.skipped, self.say)
        if lines.kind != "prompt":
            return list(lines.groups), list(lines.lines)
        groups = add_base_answers(
            lines.groups, self.backend, self.run, file.settings, file.max_length, self.say
        )
        pairs = [(g, n) for g, n in zip(groups, lines.lines, strict=True) if g]
        if len(pairs) < len(groups):
            self.say(f"{len(groups) - len(pairs)} prompts of {path} have empty answers: left out")
        if not pairs:
            raise DataError(
                f"{path} must have a prompt that the base model answers, and all answers are "
                f"empty: put answers into its lines, or set temperature = 1 in its table."
            )
        return [group for group, _ in pairs], [number for _, number in pairs]

    def data(self, spec: RegularizerSpec, lines: _Lines) -> TermData:
        """Data of a term, with `reference_logprobs` if it reads them."""
        train, held_out = list(lines.train), lines.held_out
        if self.terms.reads_reference_of_data(spec):
            rollouts = self.config.rollouts
            temperature = 1.0 if rollouts is None else rollouts.policy_temperature
            used = self._used(spec, len(train))
            chosen = [train[index] for index in used]
            chosen = add_reference_logprobs(
                chosen, self.backend, self.run, self.say, temperature=temperature
            )
            for index, group in zip(used, chosen, strict=True):
                train[index] = group
        if self.terms.measures_reference_of_data(spec):
            held_out = add_reference_logprobs(held_out, self.backend, self.run, self.say)
        origins: dict[int, tuple[str, int, str]] = {}
        for groups, numbers, name in (
            (train, lines.train_lines, lines.file),
            (held_out, lines.held_out_lines, lines.held_out_file),
        ):
            data = [datum for group in groups for datum in group]
            for datum, (line, part) in zip(data, origins_of(groups, numbers), strict=True):
                origins[id(datum)] = name, line, part
        return TermData(train, [datum for group in held_out for datum in group], origins)

    def _used(self, spec: RegularizerSpec, count: int) -> list[int]:
        """Indices of the lines that a call of the run has, whether the term is enabled or not."""
        train, rollouts = self.config.train, self.config.rollouts
        calls = train.gradient_accumulation_steps * (1 if rollouts is None else rollouts.substeps)
        drawn = replace(spec, data=range(count))
        used: set[int] = set()
        for step in range(0, train.steps, spec.every):
            for call in range(calls):
                used.update(CallSeed(train.seed, call).indices_of(drawn, step))
            if len(used) == count:
                break
        return sorted(used)
