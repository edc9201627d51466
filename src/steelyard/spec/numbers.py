"""What counts as a number, NumPy's included and booleans not."""

from __future__ import annotations

import math
import numbers


def is_finite(value: object) -> bool:
    """Whether `value` is a real number that a finite float can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def is_whole(value: object, *, at_least: int) -> bool:
    """Whether `value` is a whole number of at least that size."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and int(value) >= at_least  # type: ignore[call-overload]  # whole
