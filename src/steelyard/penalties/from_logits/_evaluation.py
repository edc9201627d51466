"""One term over logits, on whichever kind of array came."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array, cast, is_jax, is_torch
from steelyard.penalties._reduction import reduce
from steelyard.penalties.from_logits._components import Component, Parts
from steelyard.penalties.from_logits._inputs import Rows
from steelyard.penalties.from_logits._projected import Projected
from steelyard.penalties.from_logits._sweep import Wants, sweep


def evaluated(rows: Rows | Projected, parts: Parts, reduction: str) -> Array:
    """The weighted sum of the components, reduced; differentiable in torch and JAX."""
    components, weights = [each for each, _ in parts], [count for _, count in parts]
    if isinstance(rows, Projected):
        from steelyard.penalties.from_logits import _chunked  # noqa: PLC0415  # needs torch

        return _chunked.evaluated(rows, components, weights, reduction)
    if is_torch(rows.logits):
        return _torch(rows, components, weights, reduction)
    values = value_rows(rows, components)
    total = sum(weight * values[i] for i, weight in enumerate(weights))
    value = cast(rows.xp, reduce(rows.xp, total, reduction, rows.mask), rows.dtype)
    return value.reshape(rows.shape) if reduction == "none" else value


def value_rows(rows: Rows, components: Sequence[Component]) -> Array:
    """`[components, rows]` of NumPy or JAX arrays."""
    if is_jax(rows.logits):
        from steelyard.penalties.from_logits import _jax  # noqa: PLC0415  # needs JAX

        return _jax.value_rows(rows.logits, rows.reference, rows.targets, rows.mask, components)
    check_targets(rows)
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


def check_targets(rows: Rows) -> None:
    """Say which target is no class, where looking costs nothing.

    On a GPU and inside JAX it would wait for the device; there such a row's loss is NaN.

    Raises:
        InputError: A target of a row that counts is out of range.
    """
    if rows.targets is None:
        return
    bad = (rows.targets < 0) | (rows.targets >= rows.logits.shape[-1])
    if rows.mask is not None:
        bad = bad & rows.mask
    if bad.any():
        raise InputError(
            f"targets must be in [0, {rows.logits.shape[-1] - 1}] where the mask is true, got "
            f"{int(rows.targets[bad][0])}; mask the rows that have no target."
        )


def _torch(
    rows: Rows, components: Sequence[Component], weights: Sequence[float], reduction: str
) -> Array:
    from steelyard.penalties.from_logits import _operators  # noqa: PLC0415  # needs torch

    problem = (rows.logits, rows.reference, rows.targets)
    flat = (*_operators.flat(components), list(weights))
    if reduction == "none":
        scale, _ = rows.scale("sum")
        return _operators.rows(*problem, scale, *flat)[0].reshape(rows.shape)
    scale, share = rows.scale(reduction)
    if _operators.is_late(rows.logits, rows.reference):
        values = _operators.rows(*problem, rows.scale("sum")[0], *flat)[0]
        return share * (values if scale is None else values * scale).sum()
    wants = [*_operators.wanted(rows.logits, rows.reference), False]
    return _operators.compose(*problem, scale, *flat, share, wants)[0]
