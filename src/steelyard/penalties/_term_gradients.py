"""The gradient of one term with respect to its inputs, with its value, in one pass each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from steelyard.errors import GradientError, InputError
from steelyard.penalties._arrays import (
    Array,
    is_floating,
    is_jax,
    is_torch,
    namespace,
    widen,
)
from steelyard.penalties._terms import Term, listed


def leaves(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs, each as an array of its own that a gradient can be asked of.

    Torch inputs become aliases, so that one tensor under two names has two gradients while
    the total stays connected to the caller's graph.
    """
    return {name: _torch_leaf(x) if is_torch(x) else x for name, x in inputs.items()}


def value_and_gradients(
    term: Term, arguments: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Evaluate the term once and differentiate it once, with respect to its floating inputs."""
    free = {name: x for name, x in arguments.items() if is_floating(x)}
    if any(is_jax(x) for x in free.values()):
        return _jax(term, arguments, free)
    if any(is_torch(x) for x in free.values()):
        return _torch(term, arguments, free)
    kinds = [f"{name}: {type(x).__qualname__}" for name, x in arguments.items()]
    raise InputError(
        f"track_grad_norms needs floating-point torch or JAX arrays, got {listed(kinds)} for "
        f"penalty {term.name!r}; NumPy has no automatic differentiation. Convert with "
        "torch.as_tensor, or leave track_grad_norms out."
    )


def joint_norm(gradients: Mapping[str, Array]) -> float:
    """L2 norm of all the arrays together."""
    norms = []
    for gradient in gradients.values():
        xp = namespace(gradient=gradient)
        norms.append(float(xp.linalg.vector_norm(widen(xp, gradient))))
    return math.hypot(*norms)


def add_weighted(
    total: dict[str, Array], weight: float, gradients: dict[str, Array]
) -> dict[str, Array]:
    """`total + weight · gradients`, by input, in at least float32."""
    summed = dict(total)
    for name, gradient in gradients.items():
        xp = namespace(gradient=gradient)
        share = weight * widen(xp, gradient)
        summed[name] = summed[name] + share if name in summed else share
    return summed


def _torch_leaf(x: Array) -> Array:
    if not is_floating(x):
        return x
    import torch  # noqa: PLC0415  # a tensor proves that it is there

    with torch.enable_grad():
        return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _torch(
    term: Term, arguments: Mapping[str, Array], free: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    import torch  # noqa: PLC0415  # a tensor proves that it is there

    with torch.enable_grad():
        value = term.value(arguments)
    found: Sequence[Array | None] = [None] * len(free)
    if is_torch(value) and value.requires_grad:
        # The graph is kept: the caller differentiates the total.
        found = torch.autograd.grad(
            value, list(free.values()), retain_graph=True, allow_unused=True
        )
    if all(gradient is None for gradient in found):
        raise GradientError(
            f"penalty {term.name!r} must depend differentiably on its inputs, got a value "
            "without a gradient; give it differentiable=False if it is meant so.",
            term=term.name,
        )
    return value, {
        name: gradient for name, gradient in zip(free, found, strict=True) if gradient is not None
    }


def _jax(
    term: Term, arguments: Mapping[str, Array], free: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    import jax  # noqa: PLC0415  # only ever reached with a JAX array in hand

    value, pull_back = jax.vjp(lambda point: term.value({**arguments, **point}), dict(free))
    [gradients] = pull_back(jax.numpy.ones_like(value))
    return value, gradients
