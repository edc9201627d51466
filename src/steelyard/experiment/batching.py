"""Batches and the held-out split, as functions of the seed and the step alone.

Nothing is carried from one step to the next, so a resumed run needs only its step to continue
with the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

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


def _order(epoch: int, count: int, seed: int) -> list[int]:
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return order
