"""Masks and reductions: which elements count, and how their values become the result."""

from __future__ import annotations

import math
from typing import Any

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, Namespace, dtype_name, namespace
from steelyard.penalties._options import one_of

REDUCTIONS = ("sum", "mean", "none")


def accept_mask(xp: Namespace, mask: Array | None, x: Array, axis: int | None) -> Array | None:
    """Check a mask over the elements of `x`, or over its rows where `axis` is one row.

    Returns:
        The mask in the full shape of what it selects from.
    """
    if mask is None:
        return None
    namespace(x=x, mask=mask)
    if dtype_name(mask) != "bool":
        raise InputError(
            f"mask must hold booleans, got {dtype_name(mask)}; compare first, as in weights != 0."
        )
    shape = tuple(x.shape) if axis is None else tuple(x.shape[:axis]) + tuple(x.shape[axis + 1 :])
    given = tuple(mask.shape)
    spread = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(m not in (1, s) for m, s in spread):
        counted = "the array's shape" if axis is None else "the array's shape without its axis"
        raise InputError(f"mask must broadcast to {shape} ({counted}), got shape {given}.")
    return xp.broadcast_to(mask, shape)


def keep(xp: Namespace, x: Array, mask: Array | None, axis: int | None = None) -> Array:
    """Put 0 where the mask is false, *before* the formula.

    A mask on the result alone would let a NaN through: its gradient is 0 · NaN.
    """
    if mask is None:
        return x
    return xp.where(mask if axis is None else xp.expand_dims(mask, axis=axis), x, 0.0)


def reduce(xp: Namespace, values: Array, reduction: str, mask: Array | None = None) -> Array:
    """Reduce over every axis; what the mask leaves out counts nowhere.

    The mean of nothing is 0, as its sum.
    """
    if mask is not None:
        values = xp.where(mask, values, 0.0)
    if reduction == "none":
        return values
    total = xp.sum(values)
    return total if reduction == "sum" else total / count(xp, values, mask)


def count(xp: Namespace, values: Array, mask: Array | None) -> Any:  # a Python or array number
    """Count the elements that take part, at least 1 so that it can divide."""
    if mask is None:
        return max(math.prod(values.shape), 1)
    # Counted in integers: float32 stops counting at 2**24.
    kept = xp.sum(xp.astype(mask, xp.int32))
    return xp.astype(xp.where(kept == 0, 1, kept), values.dtype)


def accept_reduction(value: object, allowed: tuple[str, ...] = REDUCTIONS) -> str:
    return one_of("reduction", value, allowed)
