"""Norms of the gradients of all terms, by one vmapped VJP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from steelyard.integrations.jax.penalty_inputs import Tree


def gradient_norms(
    values: Callable[[Tree], Mapping[str, jax.Array]],
    params: Tree,
    weights: Mapping[str, Any],  # numbers and traced scalars
) -> dict[str, jax.Array]:
    """The norm of each value's gradient with respect to `params`, and of their weighted sum.

    The values are stacked to one vector, which is evaluated once; its VJP is vmapped over the
    rows of the identity. The gradients of all terms are there at once: memory for as many copies
    of the parameters.

    Returns:
        The norm of each, unweighted, by name, and that of the `"total"`.
    """
    names: list[str] = []

    def stacked(point: Tree) -> jax.Array:
        found = values(point)
        names[:] = found
        return jnp.stack([wide(value) for value in found.values()])

    rows, pull_back = jax.vjp(stacked, params)
    [gradients] = jax.vmap(pull_back)(jnp.eye(len(names), dtype=rows.dtype))
    leaves = [wide(leaf).reshape(len(names), -1) for leaf in jax.tree.leaves(gradients)]
    norms = _joint([jnp.linalg.norm(leaf, axis=1) for leaf in leaves])
    shares = jnp.stack([jnp.asarray(weights[name], rows.dtype) for name in names])
    total = _joint([jnp.linalg.norm(shares @ leaf) for leaf in leaves])
    return {**dict(zip(names, norms, strict=True)), "total": total}


def wide(value: Any) -> jax.Array:  # an array, or what can be one
    """In float32 at least."""
    array = jnp.asarray(value)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _joint(norms: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(jnp.stack(norms)), axis=0))
