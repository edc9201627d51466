"""Which lines a step trains on: a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def batch(step: int, size: int, count: int, seed: int) -> list[int]:
    """The lines of a step, of `count`: shuffled anew for each time through the data.

    Example:
        >>> [batch(step, size=2, count=4, seed=0) for step in range(3)]
        [[2, 0], [1, 3], [3, 0]]
    """
    places = range(step * size, (step + 1) * size)
    orders = {epoch: _order(epoch, count, seed) for epoch in {at // count for at in places}}
    return [orders[at // count][at % count] for at in places]


def split(items: Sequence[T], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """What is trained on, and what is held out: at least one of each, unless `fraction` is 0."""
    if not fraction or len(items) < 2:  # noqa: PLR2004 - one of each
        return list(items), []
    held = min(max(1, round(fraction * len(items))), len(items) - 1)
    chosen = set(np.random.default_rng([seed, len(items)]).permutation(len(items))[:held].tolist())
    kept = [item for index, item in enumerate(items) if index not in chosen]
    return kept, [items[index] for index in sorted(chosen)]


def _order(epoch: int, count: int, seed: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return order
