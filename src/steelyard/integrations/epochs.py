"""Schedules that count epochs, in loops that know which epoch it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.errors import SpecError
from steelyard.spec import RegularizerSpec, Schedule


@dataclass
class ByEpoch:
    """A schedule that reads the epoch, and not the step it is called with."""

    schedule: Schedule
    epoch: int = 0

    def __call__(self, step: int) -> float:  # noqa: ARG002 - every schedule takes the step
        """The weight in this epoch."""
        return self.schedule(self.epoch)


def by_epoch(schedule: Schedule) -> ByEpoch:
    """`schedule` with epochs in place of steps; `CompositeLoss.epoch` says which one it is.

    Trainers set it; in a loop of your own, set it at the start of each epoch.

    Args:
        schedule: anything that makes a weight of a number, counted from 0.

    Raises:
        SpecError: it cannot be called.

    Example:
        >>> from steelyard import schedules
        >>> weight = by_epoch(schedules.warmup(0.3, steps=3))
        >>> weight.epoch = 2  # what the composite does
        >>> round(weight(1000), 2)
        0.2
    """
    if not callable(schedule):
        raise SpecError(f"by_epoch takes a schedule, got {schedule!r}: a number needs no epochs.")
    return ByEpoch(schedule)


def tell_epoch(specs: Iterable[RegularizerSpec], epoch: int) -> None:
    """Tell the weights that count epochs which one it is."""
    for spec in specs:
        if isinstance(spec.weight, ByEpoch):
            spec.weight.epoch = epoch
