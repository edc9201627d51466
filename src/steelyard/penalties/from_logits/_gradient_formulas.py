"""The plain formulas with their gradients, written out: no automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from steelyard.penalties._arrays import Array, Namespace, clamp, logaddexp
from steelyard.penalties.divergences import LOG_ZERO
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    ENTROPY,
    FORWARD,
    JS,
    REVERSE,
    Component,
)
from steelyard.penalties.from_logits._value_formulas import log_probs, log_sum, taken

# Values by row, and the gradients by logits and by reference, None being 0 throughout; an array
# is `Any`, which takes in None.
Slope: TypeAlias = tuple[Array, Array, Array]


def component_slopes(
    xp: Namespace,
    components: Sequence[Component],
    logits: Array,
    reference: Array | None,
    targets: Array | None,
) -> list[Slope]:
    """Each component's value and gradients by row; arguments as in `component_rows`.

    With `a = log p` and `b = log q` of `p = softmax(logits / T)` and `q` of the reference, a
    function f of a and b has the gradient `(∂f/∂a - p · Σ ∂f/∂a) / T` by the logits.
    """
    return [_slope(xp, each, logits, reference, targets) for each in components]


def _slope(
    xp: Namespace,
    component: Component,
    logits: Array,
    reference: Array | None,
    targets: Array,
) -> Slope:
    kind, temperature, limit = component
    a = log_probs(xp, logits, temperature)
    p = xp.exp(a)
    if kind == ENTROPY:
        a = clamp(xp, a, LOG_ZERO)
        value = -xp.sum(p * a, axis=-1)
        return value, -p * (a + value[:, None]) / temperature, None
    if kind == CROSS_ENTROPY:
        hit = xp.arange(a.shape[-1], device=_device(a))[None, :] == targets[:, None]
        return -taken(xp, a, targets), (p - xp.astype(hit, p.dtype)) / temperature, None
    if kind in (FORWARD, REVERSE, JS):
        b = log_probs(xp, reference, temperature)
        q = xp.exp(b)
        if kind == JS:
            value, by_a, by_b = _js(xp, a, b, p, q)
        elif kind == FORWARD:
            value, by_a, by_b = _kl(xp, a, b, p, q, limit)
        else:
            value, by_b, by_a = _kl(xp, b, a, q, p, limit)
        return value, by_a / temperature, by_b / temperature
    level = log_sum(xp, logits, temperature)
    slope = xp.where(level == -math.inf, 0.0, 2.0 * level / temperature)
    return level**2, slope[:, None] * p, None


def _kl(xp: Namespace, a: Array, b: Array, p: Array, q: Array, limit: float) -> Slope:
    known = clamp(xp, a, LOG_ZERO)
    if limit == math.inf:
        ratio = xp.where((p == 0) & ~xp.isnan(b), 0.0, known - b)
        inside = xp.ones_like(p)
    else:
        exact = known - clamp(xp, b, LOG_ZERO)
        ratio = clamp(xp, exact, -limit, limit)
        inside = xp.astype(ratio == exact, p.dtype)
    value = xp.sum(p * ratio, axis=-1)
    mass = xp.sum(p * inside, axis=-1)
    by_a = p * (ratio + inside - (value + mass)[:, None])
    return value, by_a, q * mass[:, None] - p * inside


def _js(xp: Namespace, a: Array, b: Array, p: Array, q: Array) -> Slope:
    a, b = clamp(xp, a, LOG_ZERO), clamp(xp, b, LOG_ZERO)
    middle = logaddexp(xp, a, b) - math.log(2)
    from_p = xp.sum(p * (a - middle), axis=-1)
    from_q = xp.sum(q * (b - middle), axis=-1)
    by_a = 0.5 * p * (a - middle - from_p[:, None])
    by_b = 0.5 * q * (b - middle - from_q[:, None])
    return clamp(xp, 0.5 * (from_p + from_q), 0.0), by_a, by_b


def _device(x: Array) -> object:
    """Where to make another array; a traced JAX array does not say."""
    return x.device if hasattr(type(x), "__torch_function__") else None
