"""Plain formulas of the components' gradients in closed form, without autograd."""

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
from steelyard.penalties.from_logits._value_formulas import log_probs, log_sum, target_logprob

# Values by row, and the gradients by the logits and by the reference; None stands for 0 (`Array` is
# `Any`, which includes None).
ComponentGradients: TypeAlias = tuple[Array, Array, Array]


def component_gradients(
    xp: Namespace,
    components: Sequence[Component],
    logits: Array,
    reference: Array | None,
    targets: Array | None,
) -> list[ComponentGradients]:
    """Value and gradients by row for each component; arguments as in `component_values`.

    With `a = log p`, `b = log q`, `p = softmax(logits / T)` and `q` of the reference, a function f
    of a and b has the gradient `(∂f/∂a - p · Σ ∂f/∂a) / T` by the logits, and the same with b and q
    by the reference. That gives

        entropy H         -p · (a + H) / T
        cross-entropy     (p - onehot(target)) / T
        z-loss            2 · logsumexp(logits / T) · p / T
        KL, JS            see `_kl` and `_js`
    """
    return [_component_gradients(xp, each, logits, reference, targets) for each in components]


def _component_gradients(
    xp: Namespace,
    component: Component,
    logits: Array,
    reference: Array | None,
    targets: Array,
) -> ComponentGradients:
    kind, temperature, limit = component
    a = log_probs(xp, logits, temperature)
    p = xp.exp(a)
    if kind == ENTROPY:
        a = clamp(xp, a, LOG_ZERO)
        value = -xp.sum(p * a, axis=-1)
        return value, -p * (a + value[:, None]) / temperature, None
    if kind == CROSS_ENTROPY:
        is_target = xp.arange(a.shape[-1], device=_device(a))[None, :] == targets[:, None]
        return (
            -target_logprob(xp, a, targets),
            (p - xp.astype(is_target, p.dtype)) / temperature,
            None,
        )
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
    factor = xp.where(level == -math.inf, 0.0, 2.0 * level / temperature)
    return level**2, factor[:, None] * p, None


def _kl(xp: Namespace, a: Array, b: Array, p: Array, q: Array, limit: float) -> ComponentGradients:
    """KL(p‖q) with its gradients by a and b; reverse KL swaps the arguments.

    KL = Σ p · ratio, where ratio = a - b, clamped to ±limit. `inside` is 1 where the clamp passes
    a gradient, and `mass = Σ p · inside` (1 without a limit):

        by a:  p · (ratio + inside - KL - mass)        by b:  q · mass - p · inside
    """
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


def _js(xp: Namespace, a: Array, b: Array, p: Array, q: Array) -> ComponentGradients:
    """JS = (Σ p · (a - m) + Σ q · (b - m)) / 2, m = log((p + q) / 2), with its gradients.

    The derivative of m cancels, since Σ (p + q) / 2 is constant:

        by a:  p · (a - m - Σ p · (a - m)) / 2         by b:  the same with q and b
    """
    a, b = clamp(xp, a, LOG_ZERO), clamp(xp, b, LOG_ZERO)
    middle = logaddexp(xp, a, b) - math.log(2)
    from_p = xp.sum(p * (a - middle), axis=-1)
    from_q = xp.sum(q * (b - middle), axis=-1)
    by_a = 0.5 * p * (a - middle - from_p[:, None])
    by_b = 0.5 * q * (b - middle - from_q[:, None])
    return clamp(xp, 0.5 * (from_p + from_q), 0.0), by_a, by_b


def _device(x: Array) -> object:
    """Device for another array; None for a traced JAX array, which has none."""
    return x.device if hasattr(type(x), "__torch_function__") else None
