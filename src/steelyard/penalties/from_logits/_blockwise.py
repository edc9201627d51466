"""Values and gradients of components over all rows, one block of rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steelyard.penalties._arrays import Array, Namespace, gram, is_torch, widen
from steelyard.penalties.from_logits._components import Component
from steelyard.penalties.from_logits._formulas import (
    ComponentGradients,
    block_rows,
    component_gradients,
    component_values,
)


class Wants(NamedTuple):
    """Outputs of a sweep beside the values.

    Attributes:
        logits: The gradient of the weighted total by the logits.
        reference: The gradient by the reference.
        gram: The inner products of the components' gradients by the logits.
    """

    logits: bool = False
    reference: bool = False
    gram: bool = False

    @property
    def any(self) -> bool:
        return self.logits or self.reference or self.gram


class SweepResult(NamedTuple):
    """Result of a sweep; outputs that were not wanted are None.

    Attributes:
        values: `[components + 1 or more, rows]`, times each row's scale: the components, then rows
            that add up to the weighted total (the kernels store the share of JS separately).
        logits: Σ weight · scale · gradient by the logits, in their dtype.
        reference: The same by the reference.
        gram: `[components, components]`: inner products of the components' scaled gradients by the
            logits, summed over all rows, in float64.
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
) -> SweepResult:
    """Compute values and gradients of NumPy arrays or torch tensors by the plain formulas.

    Rows are independent, so only one block's temporaries exist at a time.

    Args:
        xp: The namespace of the arrays.
        logits: `[rows, classes]`.
        reference: The same shape, or None if no component needs it.
        targets: `[rows]`, or None.
        scale: `[rows]`: factor of each row; a row of factor 0 is not read. None is 1.
        components: Components to compute.
        weights: Weight of each component in the total.
        wants: Outputs to compute beside the values.
    """
    rows, classes = logits.shape
    wide = widen(xp, logits[:0]).dtype
    values = _new(xp, logits, (len(components) + 1, rows), wide)
    values[-1, :] = 0.0
    by_logits = xp.empty_like(logits) if wants.logits else None
    by_reference = xp.empty_like(reference) if wants.reference else None
    products = _new(xp, logits, (len(components), len(components)), xp.float64)
    products[...] = 0.0
    size = block_rows(classes)
    for start in range(0, rows, size):
        at = slice(start, start + size)
        share = None if scale is None else scale[at]
        z, r, t = (masked_block(xp, x, at, share) for x in (logits, reference, targets))
        if not wants.any:
            found = component_values(xp, components, z, r, t)
            gradients: list[ComponentGradients] = []
        else:
            gradients = component_gradients(xp, components, z, r, t)
            found = [each[0] for each in gradients]
        for i, (each, weight) in enumerate(zip(found, weights, strict=True)):
            values[i, at] = _scaled(xp, each, share)
            values[-1, at] += weight * values[i, at]
        if by_logits is not None:
            by_logits[at] = _weighted(xp, [each[1] for each in gradients], weights, share, z)
        if by_reference is not None:
            by_reference[at] = _weighted(xp, [each[2] for each in gradients], weights, share, r)
        if wants.gram:
            flat = [xp.reshape(_scaled(xp, each[1], share), (-1,)) for each in gradients]
            products += xp.astype(gram(xp, xp.stack(flat)), xp.float64)
    return SweepResult(values, by_logits, by_reference, products if wants.gram else None)


def _new(xp: Namespace, like: Array, shape: tuple[int, ...], dtype: object) -> Array:
    return xp.empty(shape, dtype=dtype, device=like.device if is_torch(like) else None)


def masked_block(xp: Namespace, x: Array | None, at: slice, share: Array | None) -> Array | None:
    """Rows `at` of an array, widened, with 0 where the factor `share` of the row is 0."""
    if x is None:
        return None
    part = x[at]
    if share is not None:  # masked before the formula, since 0 · NaN is NaN
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


def _weighted(
    xp: Namespace,
    gradients: Sequence[Array | None],
    weights: Sequence[float],
    share: Array | None,
    like: Array,
) -> Array:
    total = xp.zeros_like(like)
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is not None:
            total = total + weight * gradient
    return _scaled(xp, total, share)
