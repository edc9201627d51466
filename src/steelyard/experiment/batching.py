"""Batches of lines and the held-out split, as functions of the seed and the step alone.

Nothing is carried from one step to the next, so a resumed run needs only its step to continue
with the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tinker import types

from steelyard.experiment.backend import Backend
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.config_train import TrainConfig
from steelyard.experiment.data_source import PREFERENCE, StepData, TrainingBatch
from steelyard.experiment.encoding import EncodedRecord
from steelyard.experiment.held_out import evaluate_held_out

if TYPE_CHECKING:
    from steelyard.experiment.dataset import Dataset

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
