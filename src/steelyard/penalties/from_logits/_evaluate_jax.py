"""Plain formulas over the rows of JAX arrays: traceable, differentiable, in blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from steelyard.penalties._arrays import Array, namespace, widen
from steelyard.penalties.from_logits._components import Component
from steelyard.penalties.from_logits._formulas import (
    SweepResult,
    block_rows,
    component_gradients,
    component_values,
)


def value_rows(
    logits: Array,
    reference: Array | None,
    targets: Array | None,
    mask: Array | None,
    components: Sequence[Component],
) -> Array:
    """Values by row, `[components, rows]`; the backward pass recomputes a block (checkpointing)."""
    xp = namespace(logits=logits)

    def values(z: Array, r: Array | None, t: Array | None) -> Array:
        return jnp.stack([rows[0] for rows in component_values(xp, components, z, r, t)])

    return _map_rows(jax.checkpoint(values), logits, reference, targets, mask).T


def gradient_and_gram(
    logits: Array,
    reference: Array | None,
    targets: Array | None,
    scale: Array,
    components: Sequence[Component],
    weights: Sequence[float],
) -> SweepResult:
    """Gradient of the weighted total by the logits, and the components' inner products."""
    xp = namespace(logits=logits)

    def gradients(z: Array, r: Array | None, t: Array | None) -> tuple[Array, Array, Array]:
        components_gradients = component_gradients(xp, components, z, r, t)
        rows = jnp.stack([by_logits[0] for _, by_logits, _ in components_gradients])
        total = jnp.asarray(weights, dtype=rows.dtype) @ rows
        products = jnp.matmul(rows, rows.T, precision="highest")
        return jnp.stack([value[0] for value, _, _ in components_gradients]), total, products

    values, total, products = _map_rows(gradients, logits, reference, targets, scale != 0)
    gradient = jnp.where((scale != 0)[:, None], total * scale[:, None], 0.0)
    kept = jnp.where((scale != 0)[:, None, None], products * scale[:, None, None] ** 2, 0.0)
    return SweepResult(values.T, gradient.astype(logits.dtype), None, kept.sum(0))


def _map_rows(
    fn: Callable[..., Array],
    logits: Array,
    reference: Array | None,
    targets: Array | None,
    mask: Array | None,
) -> Array:
    """Map `fn` over the rows, each as `[1, classes]`, one block of rows at a time."""
    xp = namespace(logits=logits)

    def row(arrays: tuple[Array, Array | None, Array | None, Array | None]) -> Array:
        counts = arrays[3]
        kept = (
            x if x is None or counts is None else jnp.where(counts, x, jnp.zeros_like(x))
            for x in arrays[:3]
        )
        z, r, t = (None if x is None else widen(xp, x)[None] for x in kept)
        return fn(z, r, t)

    arrays = (logits, reference, targets, mask)
    return jax.lax.map(row, arrays, batch_size=block_rows(logits.shape[-1]))
