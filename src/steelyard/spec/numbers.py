"""Predicates on numbers; NumPy scalars count as numbers, booleans do not."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any


def is_finite(value: object) -> bool:
    """Whether `value` is a real number that a finite float can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        # Not math.isfinite: Dynamo can only compare a number that depends on the step.
        return -math.inf < float(value) < math.inf
    except OverflowError:
        return False


def is_whole(value: object, *, at_least: int) -> bool:
    """Whether `value` is a whole number of at least that size."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and int(value) >= at_least  # type: ignore[call-overload]  # whole


def is_array(value: object) -> bool:
    """Whether `value` is an array; a NumPy scalar is a number."""
    # In this order: Dynamo cannot list the attributes of a number that depends on the step.
    return not isinstance(value, numbers.Real) and hasattr(value, "shape")


def is_traced(scalar: Any) -> bool:  # an array without axes, of any library
    """Whether an array without axes has no value to read: inside `jax.jit` or `torch.compile`."""
    tensor = hasattr(type(scalar), "__torch_function__")
    return (tensor and sys.modules["torch"].compiler.is_compiling()) or not _is_readable(scalar)


def _is_readable(scalar: Any) -> bool:
    try:
        float(scalar)
    except (TypeError, RuntimeError):  # what JAX's tracers and torch's fake tensors raise
        return False
    return True
