"""How the values of terms become a total and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steelyard.penalties._arrays import (
    Array,
    cast,
    common_dtype,
    constant,
    is_array,
    is_floating,
    namespace,
    scalar_like,
    widen,
)
from steelyard.penalties._term_gradients import (
    add_weighted,
    joint_norm,
    leaves,
    value_and_gradients,
)
from steelyard.penalties._terms import Term


def values_of(terms: Sequence[Term], inputs: Array | Mapping[str, Array]) -> list[Array]:
    return [term.evaluate(inputs) for term in terms]


def values_and_norms(
    terms: Sequence[Term], inputs: Array | Mapping[str, Array]
) -> tuple[list[Array], dict[str, float]]:
    """Each term evaluated once and differentiated once; `"total"` is the weighted sum's norm."""
    inputs = leaves(inputs) if isinstance(inputs, Mapping) else leaves({"x": inputs})["x"]
    values: list[Array] = []
    norms: dict[str, float] = {}
    total: dict[str, Array] = {}
    for term in terms:
        if term.differentiable:
            value, gradients = value_and_gradients(term, term.arguments(inputs))
            norms[term.name] = joint_norm(gradients)
            total = add_weighted(total, term.weight, gradients)
        else:
            value = term.evaluate(inputs)
        values.append(value)
    if terms:
        norms["total"] = joint_norm(total)
    return values, norms


def weighted_sum(
    terms: Sequence[Term], values: Sequence[Array], inputs: Array | Mapping[str, Array]
) -> Array:
    """Σ weight · value, with narrow floats summed in float32 and given back in their type."""
    named = {term.name: value for term, value in zip(terms, values, strict=True)}
    arrays = {name: value for name, value in named.items() if is_array(value)}
    if not arrays:
        total = sum(term.weight * named[term.name] for term in terms)
        return _like_inputs(inputs, float(total))
    xp = namespace(**arrays)
    total = 0.0
    for term in terms:
        value = named[term.name]
        total = total + term.weight * (widen(xp, value) if term.name in arrays else value)
    return cast(xp, total, common_dtype(xp, list(arrays.values())))


def metrics_of(
    terms: Sequence[Term], values: Sequence[Array], norms: Mapping[str, float], total: Array
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for term, value in zip(terms, values, strict=True):
        raw = float(constant(value))
        metrics[term.name] = raw
        metrics[f"{term.name}_weighted"] = term.weight * raw
        if term.name in norms:
            metrics[f"{term.name}_grad_norm"] = norms[term.name]
    metrics["total"] = float(constant(total))
    if "total" in norms:
        metrics["total_grad_norm"] = norms["total"]
    return metrics


def _like_inputs(inputs: Array | Mapping[str, Array], total: float) -> Array:
    """A total that no array took part in, as an array of the inputs' kind where there is one."""
    candidates = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    for x in candidates:
        if is_floating(x):
            return scalar_like(x, total)
    return total
