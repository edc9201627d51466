"""What a run works on: the data it trains on, those it is measured on, and its prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinker import types

from steelyard.errors import DataError
from steelyard.experiment.backend import Backend
from steelyard.experiment.batching import batch, split
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config import Config
from steelyard.experiment.data_files import DataFile, Group, Kind, read_records
from steelyard.experiment.encoding import Encoder
from steelyard.experiment.reference_logprobs import with_reference
from steelyard.experiment.run_dir import RunFolder


@dataclass(frozen=True)
class Dataset:
    """The data of a run, ready for the client.

    Attributes:
        train: the data of each line.
        held_out: data that are only measured.
        kind: what the lines are.
        encoder: what made them.
    """

    train: Sequence[Group]
    held_out: Sequence[types.Datum]
    kind: Kind
    encoder: Encoder

    def prompt(self, text: str) -> types.ModelInput:
        """A prompt in the form of the data."""
        return self.encoder.prompt(text, self.kind)


def gather(
    config: Config, terms: Terms, backend: Backend, run: RunFolder, say: Callable[[str], None]
) -> Dataset:
    """Read, check and encode the data; compute what terms need of the base model.

    Raises:
        DataError: a line is malformed and may not be.
        RunError: the files have changed since the run began.
    """
    settings = config.data
    encoder = Encoder(backend.tokenizer, settings.max_length)
    found = _read(settings.path, encoder, skip_bad=settings.skip_bad, say=say)
    if isinstance(settings.held_out, str):
        apart = _read(settings.held_out, encoder, skip_bad=settings.skip_bad, say=say)
        if apart.kind != found.kind:
            raise DataError(
                f"{settings.held_out} must be of one kind with {settings.path}, {found.kind}, "
                f"got {apart.kind}."
            )
        train, held = list(found.groups), list(apart.groups)
        run.hold_data([settings.path, settings.held_out])
    else:
        train, held = split(found.groups, settings.held_out, config.train.seed)
        run.hold_data([settings.path])
    if settings.reference == "always" or (settings.reference == "auto" and terms.read_reference):
        say("computing the base model's log-probs")
        used = _used(config, len(train))
        groups = with_reference([*(train[index] for index in used), *held], backend, run)
        for index, group in zip(used, groups, strict=False):
            train[index] = group
        held = groups[len(used) :]
    say(f"{len(train)} lines to train on, {len(held)} held out")
    return Dataset(train, [datum for group in held for datum in group], found.kind, encoder)


def _used(config: Config, count: int) -> list[int]:
    """The lines that the run will come by."""
    size, seed = config.train.batch_size, config.train.seed
    steps = min(config.train.steps, -(-count // size) + 1)  # by then all have been seen
    return sorted({index for step in range(steps) for index in batch(step, size, count, seed)})


def _read(path: str, encoder: Encoder, *, skip_bad: bool, say: Callable[[str], None]) -> DataFile:
    found = read_records(path, encoder.encode, skip_bad=skip_bad)
    if found.skipped:
        many = len(found.skipped)
        say(f"{many} bad line{'s' * (many > 1)} left out, the first: {found.skipped[0]}")
    return found
