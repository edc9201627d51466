"""Evaluation of components over logits on NumPy, torch and JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from steelyard.errors import GradientError
from steelyard.penalties._arrays import Array, cast, constant, is_jax, is_torch
from steelyard.penalties._reduction import reduce
from steelyard.penalties.from_logits._components import Component, WeightedComponents
from steelyard.penalties.from_logits._formulas import Wants, component_values, masked_block, sweep
from steelyard.penalties.from_logits._logit_inputs import Rows, ShardedRows, check_targets
from steelyard.penalties.from_logits.projection import Projected

# The total, differentiable; the components' values; the gradient by the logits, if it was computed;
# the inner products of the components' gradients, if they are tracked.
Evaluated: TypeAlias = tuple[Array, Array, Array | None, Array | None]


def weighted_total(
    given: Rows | Projected | ShardedRows, terms: WeightedComponents, reduction: str
) -> Array:
    """Weighted sum of components, reduced over rows; differentiable in torch and JAX."""
    components, weights = [component for component, _ in terms], [factor for _, factor in terms]
    if isinstance(given, ShardedRows):
        return evaluate(given, components, weights, reduction)[0]
    if _has_operators(given):
        return _evaluate_torch(given, components, weights, reduction, tracks=False)[0]
    rows = given.rows
    values = value_rows(rows, components)
    total = sum(weight * values[i] for i, weight in enumerate(weights))
    value = cast(rows.xp, reduce(rows.xp, total, reduction, rows.mask), rows.dtype)
    return value.reshape(rows.shape) if reduction == "none" else value


def evaluate(
    rows: Rows | Projected | ShardedRows,
    components: Sequence[Component],
    weights: Sequence[Any],  # numbers; in JAX they may be traced
    reduction: str,
    tracks: bool = False,
) -> Evaluated:
    """Weighted sum of components, with their values and, if `tracks`, their inner products."""
    if isinstance(rows, ShardedRows):
        from steelyard.penalties.from_logits import _vocabulary_shards  # noqa: PLC0415  # needs torch

        return _vocabulary_shards.evaluate_shards(rows, components, weights, reduction, tracks)
    if _has_operators(rows):
        return _evaluate_torch(rows, components, weights, reduction, tracks)
    return _evaluate_arrays(rows.rows, components, weights, reduction, tracks)


def value_rows(rows: Rows, components: Sequence[Component]) -> Array:
    """Values of the components by row, `[components, rows]`, differentiable in torch and JAX."""
    if is_torch(rows.logits):
        xp = rows.xp
        arrays = (masked_block(xp, x, slice(None), rows.mask) for x in rows[1:4])
        return xp.stack(component_values(xp, components, *arrays))
    if is_jax(rows.logits):
        from steelyard.penalties.from_logits import _evaluate_jax  # noqa: PLC0415  # needs JAX

        return _evaluate_jax.value_rows(
            rows.logits, rows.reference, rows.targets, rows.mask, components
        )
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


def _has_operators(given: Rows | Projected) -> bool:
    """Return whether the torch operators take the inputs: tensors, outside of `torch.func`.

    They have no rules for `vmap`, and their gradient cannot be differentiated again. Inside of such
    a transform the plain formulas are evaluated, which torch maps and differentiates in any order.

    Raises:
        GradientError: A projection is evaluated inside of a transform.
    """
    if not is_torch(given.rows.logits):
        return False
    if not _in_transform():
        return True
    if isinstance(given, Projected):
        raise GradientError(
            "inside of torch.func transforms such as grad and vmap a penalty must read logits, got "
            "a projection; pass hidden @ weight.T."
        )
    return False


def _in_transform() -> bool:
    import torch  # noqa: PLC0415  # installed: tensors were passed

    from steelyard._torch_internals import active_transforms  # noqa: PLC0415  # needs torch

    return not torch.compiler.is_compiling() and bool(active_transforms())


def _evaluate_torch(
    given: Rows | Projected,
    components: Sequence[Component],
    weights: Sequence[float],
    reduction: str,
    tracks: bool,
) -> Evaluated:
    """Evaluate by the torch operators: over logits, or over a projection.

    With the reductions "mean" and "sum" the forward pass computes the gradient as well, unless it
    is deferred: then each row's factor is known in the backward pass only, as for "none".
    """
    from steelyard.penalties.from_logits import _linear_operators, _torch_operators  # noqa: PLC0415  # need torch

    flat: tuple[Any, ...] = (*_torch_operators.flat(components), list(weights))
    rows = given.rows
    if isinstance(given, Projected):
        by_rows, at_once = _linear_operators.rows, _linear_operators.compose_linear
        problem, flat = given.arrays, (*flat, given.chunk)
        wanted = _torch_operators.wanted(*problem[:3])
        deferred = given.defers_gradient(wanted)
    else:
        by_rows, at_once = _torch_operators.rows, _torch_operators.compose
        problem = (rows.logits, rows.reference, rows.targets)
        wanted = _torch_operators.wanted(rows.logits, rows.reference)
        deferred = _torch_operators.defers_gradient(rows.logits, rows.reference)
        wanted[0] |= tracks
    scale, share = rows.scale(reduction)
    if deferred or reduction == "none":
        total, values = by_rows(*problem, rows.scale("sum")[0], *flat)
        if reduction == "none":
            return total.reshape(rows.shape), values, None, None
        total, values = (
            share * (rows_of if scale is None else rows_of * scale).sum(-1)
            for rows_of in (total, values)
        )
        if not tracks:
            return total, values.detach(), None, None
    wants = [*(asked and not deferred for asked in wanted), tracks]
    reduced, values, gradient, *_, products = at_once(*problem, scale, *flat, share, wants)
    return (
        total if deferred else reduced,
        values.detach(),
        gradient.detach() if wants[0] and isinstance(given, Rows) else None,
        products.detach() if tracks else None,
    )


def _evaluate_arrays(
    rows: Rows,
    components: Sequence[Component],
    weights: Sequence[Any],
    reduction: str,
    tracks: bool,
) -> Evaluated:
    """Evaluate NumPy and JAX arrays, and tensors in transforms, by the plain formulas."""
    xp = rows.xp
    scale, share = rows.scale(reduction)
    if scale is None:
        scale = xp.full(rows.logits.shape[0], share, dtype=rows.dtype)
    values = xp.sum(value_rows(rows, components) * scale, axis=-1)
    total = sum(weight * values[i] for i, weight in enumerate(weights))
    values = constant(values)
    if not tracks:
        return total, values, None, None
    if is_torch(rows.logits):
        raise GradientError(
            "inside of torch.func transforms such as grad and vmap norms cannot be tracked, got "
            "track_grad_norms=True; call the function outside of them."
        )
    arrays = (constant(rows.logits), rows.reference, rows.targets)
    if is_jax(rows.logits):
        from steelyard.penalties.from_logits import _evaluate_jax  # noqa: PLC0415  # needs JAX

        result = _evaluate_jax.gradient_and_gram(*arrays, scale, components, weights)
    else:
        result = sweep(xp, *arrays, scale, components, weights, Wants(logits=True, gram=True))
    return total, values, result.logits, result.gram
