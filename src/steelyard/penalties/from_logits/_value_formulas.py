"""The plain formulas: one value per row for each component, on any kind of array."""

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

ELEMENTS = 2**20  # of a block of rows: 4 MB in float32


def rows_at_once(classes: int) -> int:
    return max(ELEMENTS // max(classes, 1), 1)


def component_rows(
    xp: Namespace,
    components: Sequence[Component],
    logits: Array,
    reference: Array | None,
    targets: Array | None,
) -> list[Array]:
    """One value per row for each component, differentiable where the arrays are.

    Args:
        xp: The namespace of the arrays.
        components: What to compute.
        logits: `[rows, classes]`.
        reference: The same shape; for those that compare.
        targets: `[rows]`; for cross-entropy.
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
            rows = -taken(xp, p, targets)
        else:
            rows = log_sum(xp, logits, temperature) ** 2
        found.append(rows)
    return found


def log_probs(xp: Namespace, x: Array, temperature: float) -> Array:
    # -inf is put back at the end, so that nothing but a constant reaches it and its gradient is 0.
    dead = x == -math.inf
    return xp.where(dead, -math.inf, log_softmax(xp, _scaled(xp, x, dead, temperature), -1))


def log_sum(xp: Namespace, x: Array, temperature: float) -> Array:
    dead = x == -math.inf
    scaled = _scaled(xp, x, dead, temperature)
    if is_torch(x):
        rows = scaled.logsumexp(-1)
    else:
        most = constant(xp.max(scaled, axis=-1, keepdims=True))
        rows = most[..., 0] + xp.log(xp.sum(xp.exp(scaled - most), axis=-1))
    return xp.where(xp.all(dead, axis=-1), -math.inf, rows)


def _scaled(xp: Namespace, x: Array, dead: Array, temperature: float) -> Array:
    return xp.where(dead, LOG_ZERO, x if temperature == 1 else x / temperature)


def taken(xp: Namespace, logs: Array, targets: Array) -> Array:
    """The log-probability of each row's target; NaN where there is no such class."""
    there = (targets >= 0) & (targets < logs.shape[-1])
    index = xp.astype(xp.where(there, targets, 0), xp.int64)
    taken = xp.take_along_axis(logs, index[..., None], axis=-1)[..., 0]
    return xp.where(there, taken, math.nan)
