"""Gradient norms of all terms, with one vmapped VJP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from steelyard.integrations.jax.penalty_inputs import Tree, is_parameter


def gradient_norms(
    values: Callable[[Tree], Mapping[str, jax.Array]],
    params: Tree,
    weights: Mapping[str, Any],  # numbers and traced scalars
) -> dict[str, jax.Array]:
    """Norm of each value's gradient with respect to `params`, and of their weighted sum.

    With K values v(θ) stacked to one vector `[K]`, row k of the Jacobian is ∂vₖ/∂θ = eₖᵀJ: the VJP
    of one evaluation, vmapped over the rows of the identity, gives all gradients. They exist at the
    same time, which takes memory for K copies of the parameters.

    Inside `jax.shard_map` vₖ is the mean over the devices on which it differs, and parameters that
    differ are shards of one tree: the norms are those of one device with the whole batch.

    Args:
        values: the values at given parameters, by name.
        params: a tree of arrays; other leaves, such as functions, and integers are constants.
        weights: one for each value.

    Returns:
        ‖∂vₖ/∂θ‖, unweighted, by name, and ‖Σₖ weightₖ ∂vₖ/∂θ‖ as `"total"`.
    """
    names: list[str] = []
    leaves, tree = jax.tree.flatten(params)
    free = [index for index, leaf in enumerate(leaves) if is_parameter(leaf)]

    def stacked(point: list[jax.Array]) -> jax.Array:
        placed = dict(zip(free, point, strict=True))
        whole = [placed.get(index, leaf) for index, leaf in enumerate(leaves)]
        by_name = values(jax.tree.unflatten(tree, whole))
        names[:] = by_name  # known once it is traced
        stack = jnp.stack([at_least_float32(value) for value in by_name.values()])
        axes = _varying_axes(stack)
        if not axes:
            return stack
        mean: jax.Array = jax.lax.pmean(stack, axes)  # type: ignore[no-untyped-call]
        return mean

    stack, vjp = jax.vjp(stacked, [leaves[index] for index in free])
    [gradients] = jax.vmap(vjp)(jnp.eye(len(names), dtype=stack.dtype))
    # [K, P] for each leaf of P parameters. The norm of the whole tree is that of its leaves' norms.
    rows = [at_least_float32(leaf).reshape(len(names), -1) for leaf in gradients]
    norms = _norm_of_norms([_whole_norm(row) for row in rows])
    factors = jnp.stack([jnp.asarray(weights[name], stack.dtype) for name in names])
    total = _norm_of_norms([_whole_norm(factors @ row) for row in rows])
    return {**dict(zip(names, norms, strict=True)), "total": total}


def at_least_float32(value: Any) -> jax.Array:  # an array, or what can be one
    """The value as an array, float16 and bfloat16 as float32."""
    array = jnp.asarray(value)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _whole_norm(row: jax.Array) -> jax.Array:
    """Norm over the last axis; of the whole leaf, if devices have shards of it."""
    local: jax.Array = jnp.linalg.norm(row, axis=-1)
    axes = _varying_axes(row)
    if not axes:
        return local
    squares: jax.Array = jax.lax.psum(jnp.square(local), axes)  # type: ignore[no-untyped-call]
    return jnp.sqrt(squares)


def _varying_axes(array: jax.Array) -> tuple[str, ...]:
    """Axes of the mesh of an enclosing `jax.shard_map` along which an array differs."""
    return tuple(jax.typeof(array).manual_axis_type.varying)


def _norm_of_norms(norms: list[jax.Array]) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(jnp.stack(norms)), axis=0))
