"""Settings of an evaluation: one frozen object, built and validated once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import cast

from steelyard.composition.aggregate import Aggregator
from steelyard.composition.weightings import AggregatorLike, aggregator_of
from steelyard.errors import SpecError
from steelyard.execution.workers import Workers
from steelyard.spec.checks import is_whole
from steelyard.spec.regularizer import check_timeout


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation, by the names of the arguments of `Pipeline`, which explains them.

    `dataclasses.replace` keeps the aggregator, which may have a state.

    Attributes:
        track_grad_norms: whether norms and cosines are computed.
        parallel: whether offloaded terms overlap.
        timeout: seconds each term may take, unless its spec says otherwise.
        max_concurrency: number of threads, and of processes, at once; None is one per core.
        check_finite: whether a NaN or infinite value or gradient is a failure of its term.
        workers: the pools that run offloaded terms; None is those that the process shares.
        aggregate: how gradients become one; an `Aggregator` once the settings are built.
        track_every: norms and cosines are computed at steps that this divides.
        seed: of the random numbers that terms draw; None: the one that torch was given.
        width: `max_concurrency` as a number.

    Raises:
        SpecError: a setting breaks its rule.

    Example:
        >>> settings = Settings(track_grad_norms=True, track_every=2)
        >>> settings.tracks(0), settings.tracks(1)
        (True, False)
    """

    track_grad_norms: bool = False
    parallel: bool = True
    timeout: float = 30.0
    max_concurrency: int | None = None
    check_finite: bool = True
    workers: Workers | None = None
    aggregate: AggregatorLike = "sum"
    track_every: int = 1
    seed: int | None = None
    width: int = field(init=False)

    def __post_init__(self) -> None:
        width = (os.cpu_count() or 1) if self.max_concurrency is None else self.max_concurrency
        if not is_whole(width, at_least=1):
            raise SpecError(
                f"max_concurrency must be a whole number >= 1 or None, "
                f"got {self.max_concurrency!r}."
            )
        if not is_whole(self.track_every, at_least=1):
            raise SpecError(f"track_every must be a whole number >= 1, got {self.track_every!r}.")
        if self.seed is not None and not is_whole(self.seed, at_least=0):
            raise SpecError(f"seed must be a whole number >= 0 or None, got {self.seed!r}.")
        vars(self).update(  # the class is frozen
            width=width,
            timeout=check_timeout(self.timeout, "the pipeline"),
            aggregate=aggregator_of(self.aggregate),
        )

    @property
    def aggregator(self) -> Aggregator:
        """Aggregator that makes one gradient of those of the terms."""
        return cast("Aggregator", self.aggregate)

    def tracks(self, step: int) -> bool:
        """Whether norms and cosines are computed at a step."""
        return self.track_grad_norms and step % self.track_every == 0

    def compares_gradients(self, step: int) -> bool:
        """Whether the gradients of the terms are compared at a step, to track or to aggregate."""
        return self.tracks(step) or self.aggregator.reads_gram
