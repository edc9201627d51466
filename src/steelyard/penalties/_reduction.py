"""Masks, reductions and blocks of rows, shared by all penalties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, Namespace, dtype_name, is_torch, namespace
from steelyard.penalties._checks import one_of

REDUCTIONS = ("sum", "mean", "none")


def accept_mask(xp: Namespace, mask: Array | None, x: Array, axis: int | None) -> Array | None:
    """Check a mask over the elements of `x` or, given `axis`, over its rows along that axis.

    Returns:
        The mask, broadcast to the shape of `x`, or to that shape without `axis`.

    Raises:
        InputError: the mask is not boolean, or does not broadcast.
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
    trailing = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(m not in (1, s) for m, s in trailing):
        target = "the array's shape" if axis is None else "the array's shape without its axis"
        raise InputError(f"mask must broadcast to {shape} ({target}), got shape {given}.")
    return xp.broadcast_to(mask, shape)


def keep(xp: Namespace, x: Array, mask: Array | None, axis: int | None = None) -> Array:
    """Replace masked elements, or rows along `axis`, by 0 *before* the formula is applied.

    Masking the result alone would let a NaN into the gradient: the backward pass multiplies the
    gradient 0 of a masked result by the NaN derivative of the formula, and 0 · NaN is NaN.
    """
    if mask is None:
        return x
    return xp.where(mask if axis is None else xp.expand_dims(mask, axis=axis), x, 0.0)


def reduce(xp: Namespace, values: Array, reduction: str, mask: Array | None = None) -> Array:
    """Sum or mean over all unmasked elements, or with `"none"` the values with 0 where masked.

    The denominator of the mean is the number of unmasked elements; the mean of none is 0.
    """
    if mask is not None:
        values = xp.where(mask, values, 0.0)
    if reduction == "none":
        return values
    total = xp.sum(values)
    return total if reduction == "sum" else total / count(xp, values, mask)


def count(xp: Namespace, values: Array, mask: Array | None) -> Any:  # a Python or array number
    """Number of unmasked elements, at least 1: the denominator of a mean."""
    if mask is None:
        return max(math.prod(values.shape), 1)
    # Summed as integers: float32 cannot represent every count above 2**24.
    kept = xp.sum(xp.astype(mask, xp.int32))
    return xp.astype(xp.where(kept == 0, 1, kept), values.dtype)


def accept_reduction(value: object, allowed: tuple[str, ...] = REDUCTIONS) -> str:
    return one_of("reduction", value, allowed)


ELEMENTS = 2**20  # of a block: 4 MB in float32, so that intermediate results stay in the cache


def by_rows(formula: Callable[..., Array], arrays: Sequence[Array], axis: int) -> Array:
    """Apply `formula`, which reduces `axis` (negative), and return one value per row.

    Eager torch writes every intermediate result to memory. On a CPU these writes, and the page
    faults of newly allocated memory, take several times as long as the arithmetic; compiled code,
    accelerators and XLA gain nothing from blocks. Blocks are used only where
    rows lie along the last axis.
    """
    if axis != -1 or not _is_large_cpu_tensor(arrays[0]):
        return formula(*arrays)
    import torch  # noqa: PLC0415  # installed: a tensor was passed

    *leading, row = arrays[0].shape
    rows = max(ELEMENTS // row, 1)
    blocks = zip(*(x.reshape(-1, row).split(rows) for x in arrays), strict=True)
    return torch.cat([formula(*block) for block in blocks]).reshape(leading)


def _is_large_cpu_tensor(x: Array) -> bool:
    if not is_torch(x) or math.prod(x.shape) < 2 * ELEMENTS or x.device.type != "cpu":
        return False
    import torch  # noqa: PLC0415  # installed: a tensor was passed

    return not torch.compiler.is_compiling()
