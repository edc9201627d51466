"""The components' values and gradients over all rows, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steelyard.penalties._arrays import Array, Namespace, gram, is_torch, widen
from steelyard.penalties.from_logits._components import Component
from steelyard.penalties.from_logits._gradient_formulas import Slope, component_slopes
from steelyard.penalties.from_logits._value_formulas import component_rows, rows_at_once


class Wants(NamedTuple):
    """What is wanted beside the values."""

    logits: bool = False
    reference: bool = False
    gram: bool = False

    @property
    def any(self) -> bool:
        return self.logits or self.reference or self.gram


class Swept(NamedTuple):
    """What came of it; what was not wanted is None.

    Attributes:
        values: `[components + 1 or more, rows]`, scaled: the components', then what adds up to the
            weighted total.
        logits: Σ weight · scale · gradient by the logits, in their dtype.
        reference: The same by the reference.
        gram: Inner products of the components' scaled gradients by the logits.
    """

    values: Array
    logits: Array | None
    reference: Array | None
    gram: Array | None


def sweep(
    xp: Namespace,
    logits: Array,
    reference: Array | None,
    targets: Array | None,
    scale: Array | None,
    components: Sequence[Component],
    weights: Sequence[float],
    wants: Wants,
) -> Swept:
    """Go over the rows of NumPy arrays or torch tensors, holding one block's temporaries.

    Args:
        xp: The namespace of the arrays.
        logits: `[rows, classes]`.
        reference: The same shape, or None where no component compares.
        targets: `[rows]`, or None.
        scale: `[rows]`: what each row counts; where 0, it is not looked at. None is 1.
        components: What to compute.
        weights: One for each.
        wants: What else to compute.
    """
    rows, classes = logits.shape
    wide = widen(xp, logits[:0]).dtype
    values = _new(xp, logits, (len(components) + 1, rows), wide)
    values[-1, :] = 0.0
    by_logits = xp.empty_like(logits) if wants.logits else None
    by_reference = xp.empty_like(reference) if wants.reference else None
    products = _new(xp, logits, (len(components), len(components)), xp.float64)
    products[...] = 0.0
    size = rows_at_once(classes)
    for start in range(0, rows, size):
        at = slice(start, start + size)
        share = None if scale is None else scale[at]
        z, r, t = (_block(xp, x, at, share) for x in (logits, reference, targets))
        if not wants.any:
            found = component_rows(xp, components, z, r, t)
            slopes: list[Slope] = []
        else:
            slopes = component_slopes(xp, components, z, r, t)
            found = [each[0] for each in slopes]
        for i, (each, weight) in enumerate(zip(found, weights, strict=True)):
            values[i, at] = _scaled(xp, each, share)
            values[-1, at] += weight * values[i, at]
        if by_logits is not None:
            by_logits[at] = _weighed(xp, [each[1] for each in slopes], weights, share, z)
        if by_reference is not None:
            by_reference[at] = _weighed(xp, [each[2] for each in slopes], weights, share, r)
        if wants.gram:
            flat = [xp.reshape(_scaled(xp, each[1], share), (-1,)) for each in slopes]
            products += xp.astype(gram(xp, xp.stack(flat)), xp.float64)
    return Swept(values, by_logits, by_reference, products if wants.gram else None)


def _new(xp: Namespace, like: Array, shape: tuple[int, ...], dtype: object) -> Array:
    return xp.empty(shape, dtype=dtype, device=like.device if is_torch(like) else None)


def _block(xp: Namespace, x: Array | None, at: slice, share: Array | None) -> Array | None:
    if x is None:
        return None
    part = x[at]
    if share is not None:  # before the formula: 0 · NaN would be NaN
        counts = share != 0
        part = xp.where(counts[:, None] if part.ndim > 1 else counts, part, xp.zeros_like(part))
    return widen(xp, part)


def _scaled(xp: Namespace, x: Array, share: Array | None) -> Array:
    if share is None:
        return x
    factor = xp.astype(share, x.dtype)
    if x.ndim > 1:
        factor = factor[:, None]
    return xp.where(factor != 0, x * factor, 0.0)


def _weighed(
    xp: Namespace,
    slopes: Sequence[Array | None],
    weights: Sequence[float],
    share: Array | None,
    like: Array,
) -> Array:
    total = xp.zeros_like(like)
    for slope, weight in zip(slopes, weights, strict=True):
        if slope is not None:
            total = total + weight * slope
    return _scaled(xp, total, share)
