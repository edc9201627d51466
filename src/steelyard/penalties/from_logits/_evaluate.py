"""Components over logits, on whichever kind of array came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from steelyard.penalties._arrays import Array, cast, constant, is_jax, is_torch
from steelyard.penalties._reduction import reduce
from steelyard.penalties.from_logits._blockwise import Wants, sweep
from steelyard.penalties.from_logits._components import Component, Parts
from steelyard.penalties.from_logits._logit_inputs import Rows, check_targets
from steelyard.penalties.from_logits._projection_inputs import Projected

# The total, differentiable; the components' values; the gradient by the logits, where it was
# computed; if tracked, the inner products of the components' gradients.
Evaluated: TypeAlias = tuple[Array, Array, Array | None, Array | None]


def evaluated(rows: Rows | Projected, parts: Parts, reduction: str) -> Array:
    """The weighted sum of the components, reduced; differentiable in torch and JAX."""
    components, weights = [each for each, _ in parts], [count for _, count in parts]
    if isinstance(rows, Projected) or is_torch(rows.logits):
        return evaluate(rows, components, weights, reduction)[0]
    values = value_rows(rows, components)
    total = sum(weight * values[i] for i, weight in enumerate(weights))
    value = cast(rows.xp, reduce(rows.xp, total, reduction, rows.mask), rows.dtype)
    return value.reshape(rows.shape) if reduction == "none" else value


def evaluate(
    rows: Rows | Projected,
    components: Sequence[Component],
    weights: Sequence[Any],  # numbers; in JAX they may be traced
    reduction: str,
    tracks: bool = False,
) -> Evaluated:
    """The weighted sum of the components, and what it is made of."""
    if isinstance(rows, Projected) or is_torch(rows.logits):
        return _torch(rows, components, weights, reduction, tracks)
    return _elsewhere(rows, components, weights, reduction, tracks)


def value_rows(rows: Rows, components: Sequence[Component]) -> Array:
    """`[components, rows]` of NumPy or JAX arrays."""
    if is_jax(rows.logits):
        from steelyard.penalties.from_logits import _jax  # noqa: PLC0415  # needs JAX

        return _jax.value_rows(rows.logits, rows.reference, rows.targets, rows.mask, components)
    check_targets(rows.targets, rows.mask, rows.classes)
    scale, _ = rows.scale("sum")
    return sweep(
        rows.xp,
        rows.logits,
        rows.reference,
        rows.targets,
        scale,
        components,
        [1.0] * len(components),
        Wants(),
    ).values[:-1]


def _torch(
    given: Rows | Projected,
    components: Sequence[Component],
    weights: Sequence[float],
    reduction: str,
    tracks: bool,
) -> Evaluated:
    """By the operators over logits, or by those over a projection, which take what those take."""
    from steelyard.penalties.from_logits import _linear_operators, _operators  # noqa: PLC0415  # need torch

    flat: tuple[Any, ...] = (*_operators.flat(components), list(weights))
    rows = given.rows
    if isinstance(given, Projected):
        by_rows, at_once = _linear_operators.rows, _linear_operators.compose_linear
        problem, flat = given.arrays, (*flat, given.chunk)
        wanted = _operators.wanted(*problem[:3])
        late = given.is_late(wanted)
    else:
        by_rows, at_once = _operators.rows, _operators.compose
        problem = (rows.logits, rows.reference, rows.targets)
        wanted = _operators.wanted(rows.logits, rows.reference)
        late = _operators.is_late(rows.logits, rows.reference)
        wanted[0] |= tracks
    scale, share = rows.scale(reduction)
    if late or reduction == "none":
        total, values = by_rows(*problem, rows.scale("sum")[0], *flat)
        if reduction == "none":
            return total.reshape(rows.shape), values, None, None
        total, values = (
            share * (each if scale is None else each * scale).sum(-1) for each in (total, values)
        )
        if not tracks:
            return total, values.detach(), None, None
    wants = [*(asked and not late for asked in wanted), tracks]
    made, values, gradient, *_, products = at_once(*problem, scale, *flat, share, wants)
    return (
        total if late else made,
        values.detach(),
        gradient.detach() if wants[0] and isinstance(given, Rows) else None,
        products.detach() if tracks else None,
    )


def _elsewhere(
    rows: Rows,
    components: Sequence[Component],
    weights: Sequence[Any],
    reduction: str,
    tracks: bool,
) -> Evaluated:
    """NumPy and JAX."""
    xp = rows.xp
    scale, share = rows.scale(reduction)
    if scale is None:
        scale = xp.full(rows.logits.shape[0], share, dtype=rows.dtype)
    values = xp.sum(value_rows(rows, components) * scale, axis=-1)
    total = sum(weight * values[i] for i, weight in enumerate(weights))
    values = constant(values)
    if not tracks:
        return total, values, None, None
    arrays = (constant(rows.logits), rows.reference, rows.targets)
    if is_jax(rows.logits):
        from steelyard.penalties.from_logits import _jax  # noqa: PLC0415  # needs JAX

        swept = _jax.tracked(*arrays, scale, components, weights)
    else:
        swept = sweep(xp, *arrays, scale, components, weights, Wants(logits=True, gram=True))
    return total, values, swept.logits, swept.gram
