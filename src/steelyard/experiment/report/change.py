"""Change of a metric over a run, from the means of its first and its last values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """Change of a metric from the beginning to the end of a run.

    Attributes:
        first: mean over the first `over` steps; single batches differ too much.
        last: mean over the last `over` steps.
        over: number of steps in each mean: a quarter of those compared, at least 1.
        steps: number of steps that were compared.
    """

    first: float
    last: float
    over: int = 1
    steps: int = 1

    @property
    def relative(self) -> float | None:
        """Change as a fraction of the first value; None where that is 0."""
        return (self.last - self.first) / abs(self.first) if self.first else None


def change_of(values: Sequence[float], fraction: float = 0.25) -> Change | None:
    """Means over the first and the last `fraction` of the values, at least one value each."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    over = max(1, int(fraction * len(finite)))
    first, last = (math.fsum(some) / over for some in (finite[:over], finite[-over:]))
    return Change(first, last, over, len(finite))


def mean_of(values: Sequence[Any]) -> float | None:
    """Mean of the values that are finite; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None
