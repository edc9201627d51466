"""Gradient norms of all terms, with one vmapped VJP."""

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
    """Norm of each value's gradient with respect to `params`, and of their weighted sum.

    With K values v(θ) stacked to one vector `[K]`, row k of the Jacobian is ∂vₖ/∂θ = eₖᵀJ: the VJP
    of one evaluation, vmapped over the rows of the identity, gives all gradients. They exist at the
    same time, which takes memory for K copies of the parameters.

    Args:
        values: the values at given parameters, by name.
        params: a tree of arrays.
        weights: one for each value.

    Returns:
        ‖∂vₖ/∂θ‖, unweighted, by name, and ‖Σₖ weightₖ ∂vₖ/∂θ‖ as `"total"`.
    """
    names: list[str] = []

    def stacked(point: Tree) -> jax.Array:
        by_name = values(point)
        names[:] = by_name  # known once it is traced
        return jnp.stack([at_least_float32(value) for value in by_name.values()])

    stack, vjp = jax.vjp(stacked, params)
    [gradients] = jax.vmap(vjp)(jnp.eye(len(names), dtype=stack.dtype))
    # [K, P] for each leaf of P parameters. The norm of the whole tree is that of its leaves' norms.
    leaves = [at_least_float32(leaf).reshape(len(names), -1) for leaf in jax.tree.leaves(gradients)]
    norms = _norm_of_norms([jnp.linalg.norm(leaf, axis=1) for leaf in leaves])
    factors = jnp.stack([jnp.asarray(weights[name], stack.dtype) for name in names])
    total = _norm_of_norms([jnp.linalg.norm(factors @ leaf) for leaf in leaves])
    return {**dict(zip(names, norms, strict=True)), "total": total}


def at_least_float32(value: Any) -> jax.Array:  # an array, or what can be one
    """The value as an array, float16 and bfloat16 as float32."""
    array = jnp.asarray(value)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _norm_of_norms(norms: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(jnp.stack(norms)), axis=0))
