"""Plain formulas of the components: one value per row, on any kind of array."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steelyard.penalties._arrays import Array, Namespace, constant, is_torch, log_softmax
from steelyard.penalties.divergences import LOG_ZERO, js_rows, kl_rows, negative_entropy_rows
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    ENTROPY,
    FORWARD,
    JS,
    REVERSE,
    Component,
)

ELEMENTS = 2**20  # in a block of rows: 4 MB in float32


def block_rows(classes: int) -> int:
    return max(ELEMENTS // max(classes, 1), 1)


def component_values(
    xp: Namespace,
    components: Sequence[Component],
    logits: Array,
    reference: Array | None,
    targets: Array | None,
) -> list[Array]:
    """Values by row for each component, differentiable where the arrays are.

    Args:
        xp: Namespace of the arrays.
        components: Components to compute.
        logits: `[rows, classes]`.
        reference: The same shape, for the components that need it.
        targets: `[rows]`, for the components that need them.
    """
    logs: dict[tuple[bool, float], Array] = {}

    def logs_of(of_reference: bool, temperature: float) -> Array:
        key = (of_reference, temperature)
        if key not in logs:
            logs[key] = log_probs(xp, reference if of_reference else logits, temperature)
        return logs[key]

    found = []
    for kind, temperature, limit in components:
        p = logs_of(False, temperature)
        bound = None if limit == math.inf else limit
        if kind == ENTROPY:
            rows = -negative_entropy_rows(xp, p, 1.0, -1)
        elif kind == FORWARD:
            rows = kl_rows(xp, p, logs_of(True, temperature), "forward", -1, bound)
        elif kind == REVERSE:
            rows = kl_rows(xp, p, logs_of(True, temperature), "reverse", -1, bound)
        elif kind == JS:
            rows = js_rows(xp, p, logs_of(True, temperature), -1)
        elif kind == CROSS_ENTROPY:
            rows = -target_logprob(xp, p, targets)
        else:
            rows = log_sum(xp, logits, temperature) ** 2
        found.append(rows)
    return found


def log_probs(xp: Namespace, x: Array, temperature: float) -> Array:
    """`log_softmax(x / T)` along the last axis; a class at -inf has gradient 0."""
    # -inf is put back at the end as a constant, so its gradient is 0 and not NaN.
    no_mass = x == -math.inf
    return xp.where(no_mass, -math.inf, log_softmax(xp, _scaled(xp, x, no_mass, temperature), -1))


def log_sum(xp: Namespace, x: Array, temperature: float) -> Array:
    """`logsumexp(x / T)` along the last axis; -inf for a row of all -inf."""
    no_mass = x == -math.inf
    scaled = _scaled(xp, x, no_mass, temperature)
    if is_torch(x):
        rows = scaled.logsumexp(-1)
    else:
        most = constant(xp.max(scaled, axis=-1, keepdims=True))
        rows = most[..., 0] + xp.log(xp.sum(xp.exp(scaled - most), axis=-1))
    return xp.where(xp.all(no_mass, axis=-1), -math.inf, rows)


def _scaled(xp: Namespace, x: Array, no_mass: Array, temperature: float) -> Array:
    return xp.where(no_mass, LOG_ZERO, x if temperature == 1 else x / temperature)


def target_logprob(xp: Namespace, logs: Array, targets: Array) -> Array:
    """Log-probability of each row's target; NaN for a target that is no class."""
    is_class = (targets >= 0) & (targets < logs.shape[-1])
    index = xp.astype(xp.where(is_class, targets, 0), xp.int64)
    logprob = xp.take_along_axis(logs, index[..., None], axis=-1)[..., 0]
    return xp.where(is_class, logprob, math.nan)
