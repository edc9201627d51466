"""Weighted sum of the terms of a `PenaltyPipeline`, and the norms of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steelyard.errors import GradientError, InputError
from steelyard.penalties._arrays import (
    Array,
    cast,
    common_dtype,
    is_array,
    is_floating,
    is_jax,
    is_torch,
    is_traced,
    namespace,
    scalar_like,
    widen,
)
from steelyard.penalties._penalty_term import PenaltyTerm
from steelyard.spec import listed


def values_and_norms(
    terms: Sequence[PenaltyTerm],
    weights: Mapping[str, float],
    inputs: Array | Mapping[str, Array],
) -> tuple[dict[str, Array], dict[str, float]]:
    """Evaluate each term once and differentiate it once.

    With gᵢ the gradient of term i with respect to all its floating inputs together, its norm is
    `‖gᵢ‖₂`, unweighted; under `"total"` stands `‖Σ wᵢ gᵢ‖₂`. Terms that are not differentiable
    have no norm and do not count in the total's.

    Torch inputs are replaced by aliases (`view_as`), so that one tensor under two names has two
    gradients while the values stay connected to the caller's graph.

    Raises:
        InputError: the inputs of a term are neither torch nor JAX arrays, or something is traced.
        GradientError: a term has no gradient.
    """
    refuse_traced(*weights.values())
    if isinstance(inputs, Mapping):
        inputs = {name: _leaf(x) for name, x in inputs.items()}
    else:
        inputs = _leaf(inputs)
    values: dict[str, Array] = {}
    norms: dict[str, float] = {}
    total: dict[str, Array] = {}
    for term in terms:
        if not term.differentiable:
            values[term.name] = term.evaluate(inputs)
            continue
        values[term.name], gradients = _value_and_gradients(term, term.arguments(inputs))
        refuse_traced(values[term.name])
        wide = {name: widen(namespace(gradient=x), x) for name, x in gradients.items()}
        norms[term.name] = _joint_norm(wide.values())
        for name, gradient in wide.items():
            weighted = weights[term.name] * gradient
            total[name] = total[name] + weighted if name in total else weighted
    if terms:
        norms["total"] = _joint_norm(total.values())
    return values, norms


def weighted_sum(
    weights: Mapping[str, Any],  # numbers and traced scalars
    values: Mapping[str, Array],
    inputs: Array | Mapping[str, Array],
) -> Array:
    """`Σ wᵢ · valueᵢ`; float16 and bfloat16 are summed in float32 and cast back.

    A term may return a Python number, or a count, an integer array; a sum of Python numbers alone
    becomes an array like the inputs, so that the caller always gets the same type.
    """
    arrays = {name: value for name, value in values.items() if is_array(value)}
    if not arrays:
        total = sum(weights[name] * value for name, value in values.items())
        return total if is_array(total) else _like_inputs(inputs, float(total))
    xp = namespace(**arrays)
    total = sum(
        weights[name] * (widen(xp, value) if name in arrays else value)
        for name, value in values.items()
    )
    # Integers have no part in the dtype: cast to theirs, half of a count would be rounded.
    floating = [value for value in arrays.values() if is_floating(value)]
    return cast(xp, total, common_dtype(xp, floating or [total]))


def refuse_traced(*numbers: Array) -> None:
    """Check that there are values to convert to floats.

    Raises:
        InputError: a number is traced by JAX.
    """
    if any(is_traced(x) for x in numbers):
        raise InputError(
            "compute gives metrics as floats, got traced arrays, which have no values yet; "
            "call compute_total inside jax.jit, jax.grad and jax.vmap."
        )


def _like_inputs(inputs: Array | Mapping[str, Array], total: float) -> Array:
    """Array of `total` in the library and dtype of the first floating input, if there is one."""
    candidates = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    return next((scalar_like(x, total) for x in candidates if is_floating(x)), total)


def _joint_norm(gradients: Iterable[Array]) -> float:
    """L2 norm of the concatenation of all arrays."""
    return math.hypot(*(float(namespace(x=x).linalg.vector_norm(x)) for x in gradients))


def _leaf(x: Array) -> Array:
    """Alias of a tensor that `torch.autograd.grad` can differentiate with respect to."""
    if not is_torch(x) or not is_floating(x):
        return x
    import torch  # noqa: PLC0415  # installed: a tensor was passed

    with torch.enable_grad():
        return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def _value_and_gradients(
    term: PenaltyTerm, arguments: Mapping[str, Array]
) -> tuple[Array, Mapping[str, Array]]:
    """Value of a term, and its gradients with respect to its floating inputs, by name."""
    floating = {name: x for name, x in arguments.items() if is_floating(x)}
    if any(is_jax(x) for x in floating.values()):
        import jax  # noqa: PLC0415  # installed: a JAX array was passed

        value, backward = jax.vjp(lambda point: term.value({**arguments, **point}), floating)
        return value, backward(jax.numpy.ones_like(value))[0]
    if any(is_torch(x) for x in floating.values()):
        return _torch_value_and_gradients(term, arguments, floating)
    kinds = [f"{name}: {type(x).__qualname__}" for name, x in arguments.items()]
    raise InputError(
        f"track_grad_norms needs floating-point torch or JAX arrays, got {listed(kinds)} for "
        f"penalty {term.name!r}; NumPy has no automatic differentiation. Convert with "
        "torch.as_tensor, or leave track_grad_norms out."
    )


def _torch_value_and_gradients(
    term: PenaltyTerm, arguments: Mapping[str, Array], floating: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    import torch  # noqa: PLC0415  # installed: a tensor was passed

    with torch.enable_grad():
        value = term.value(arguments)
    computed: Sequence[Array | None] = []
    if is_torch(value) and value.requires_grad:
        # The graph is retained: the caller differentiates the total.
        computed = torch.autograd.grad(
            value, list(floating.values()), retain_graph=True, allow_unused=True
        )
    gradients = {name: x for name, x in zip(floating, computed, strict=False) if x is not None}
    if not gradients:
        raise GradientError(
            f"penalty {term.name!r} must depend differentiably on its inputs, got a value "
            "without a gradient; give it differentiable=False if it is meant so.",
            term=term.name,
        )
    return value, gradients
