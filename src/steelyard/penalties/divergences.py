"""Distances between distributions, and their entropy, from log-probabilities."""

from __future__ import annotations

import math
from typing import Literal

from steelyard.penalties._arrays import (
    Array,
    Namespace,
    accept,
    cast,
    clamp,
    constant,
    log_softmax,
    logaddexp,
)
from steelyard.penalties._options import class_axis, flag, one_of, positive
from steelyard.penalties._reduction import accept_mask, accept_reduction, keep, reduce
from steelyard.penalties._row_blocks import by_rows
from steelyard.penalties.primitives import Reduction

# Stands for log 0: exp gives 0, and 0 · LOG_ZERO is 0 where 0 · (-inf) is NaN. A clamp to it
# has gradient 0 below, so that a class of probability 0 drops out of value and gradient.
LOG_ZERO = -1e30


def kl_divergence(
    p: Array,
    q: Array,
    *,
    direction: Literal["forward", "reverse", "symmetric"] = "forward",
    reduction: Reduction = "mean",
    axis: int = -1,
    mask: Array | None = None,
    max_log_ratio: float | None = 100.0,
) -> Array:
    """Kullback-Leibler divergence of two distributions given as log-probabilities.

    `"forward"` is `KL(p‖q) = Σᵢ pᵢ · (log pᵢ - log qᵢ)`, `"reverse"` is `KL(q‖p)`,
    `"symmetric"` their mean. A class whose weight (p forward, q reverse) is zero contributes
    0 to value and gradient, also where both log-probabilities are -inf.

    Args:
        p: Log-probabilities, classes on `axis`; for example `[batch, sequence, vocabulary]`.
        q: The same shape as `p`.
        direction: `"forward"`, `"reverse"` or `"symmetric"`.
        reduction: `"sum"`, `"mean"`, or `"none"` for one value per row.
        axis: The axis of the classes.
        mask: Booleans over rows (the shape without `axis`, or broadcasting to it); where
            false, the row counts in neither value, mean nor gradient. All false gives 0.
        max_log_ratio: Limit of the log ratio in either direction, beyond which its gradient
            is 0. `None` gives the exact value, which may be infinite.

    Returns:
        A scalar, or the shape without `axis` for `"none"`; dtype and device of the inputs.

    Raises:
        InputError: The arrays are not floating-point, differ in shape or have no axis; an
            option is not allowed; the mask is not boolean or does not broadcast.

    Example:
        >>> import numpy as np
        >>> p = np.log([[0.5, 0.5]])
        >>> q = np.log([[0.25, 0.75]])
        >>> print(f"{kl_divergence(p, q):.6f}")
        0.143841
        >>> print(f"{kl_divergence(p, q, direction='reverse'):.6f}")
        0.130812

    References:
        Kullback & Leibler (1951), "On information and sufficiency".
    """
    one_of("direction", direction, ("forward", "reverse", "symmetric"))
    accept_reduction(reduction)
    limit = max_log_ratio
    if limit is not None:
        limit = positive("max_log_ratio", limit, "None or a finite number > 0")
    xp, [p, q], dtype = accept(p=p, q=q)
    axis = class_axis(axis, p.ndim)
    mask = accept_mask(xp, mask, p, axis)
    p, q = keep(xp, p, mask, axis), keep(xp, q, mask, axis)
    rows = kl_rows(xp, p, q, direction, axis - p.ndim, limit)
    return cast(xp, reduce(xp, rows, reduction, mask), dtype)


def js_divergence(
    p: Array,
    q: Array,
    *,
    reduction: Reduction = "mean",
    axis: int = -1,
    mask: Array | None = None,
) -> Array:
    """Jensen-Shannon divergence: symmetric, finite, between 0 and log 2.

    `½ KL(p‖m) + ½ KL(q‖m)` with `m = ½(p + q)`, computed in log space. A class of zero
    probability contributes 0 to value and gradient on its side.

    Args:
        p: Log-probabilities, classes on `axis`.
        q: The same shape as `p`.
        reduction: `"sum"`, `"mean"`, or `"none"` for one value per row.
        axis: The axis of the classes.
        mask: Booleans over rows, as in `kl_divergence`.

    Returns:
        A scalar, or the shape without `axis` for `"none"`; dtype and device of the inputs.

    Raises:
        InputError: As for `kl_divergence`.

    Example:
        >>> import numpy as np
        >>> p = np.array([[0.0, -np.inf]])
        >>> q = np.array([[-np.inf, 0.0]])
        >>> print(f"{js_divergence(p, q):.6f}")
        0.693147

    References:
        Lin (1991), "Divergence measures based on the Shannon entropy".
    """
    accept_reduction(reduction)
    xp, [p, q], dtype = accept(p=p, q=q)
    axis = class_axis(axis, p.ndim)
    mask = accept_mask(xp, mask, p, axis)
    p, q, axis = keep(xp, p, mask, axis), keep(xp, q, mask, axis), axis - p.ndim
    rows = by_rows(lambda p, q: js_rows(xp, p, q, axis), [p, q], axis)
    return cast(xp, reduce(xp, rows, reduction, mask), dtype)


def entropy(
    logprobs: Array,
    *,
    mode: Literal["penalty", "bonus"] = "penalty",
    reduction: Reduction = "mean",
    normalize: bool = False,
    temperature: float = 1.0,
    axis: int = -1,
    mask: Array | None = None,
) -> Array:
    """Shannon entropy, signed by what adding it to a loss is to do.

    `H = -Σᵢ pᵢ · log pᵢ`. `"penalty"` returns +H: adding it lowers entropy. `"bonus"` returns
    -H: adding it raises entropy (exploration). Log-probabilities of -inf contribute 0 to
    value and gradient.

    Args:
        logprobs: Log-probabilities, classes on `axis`.
        mode: `"penalty"` or `"bonus"`.
        reduction: `"sum"`, `"mean"`, or `"none"` for one value per row.
        normalize: Divide by the log of the number of classes, so that H is between 0 and 1;
            one class gives 0.
        temperature: T > 0. Other than 1, the distribution is `softmax(logprobs / T)`.
        axis: The axis of the classes.
        mask: Booleans over rows, as in `kl_divergence`.

    Returns:
        A scalar, or the shape without `axis` for `"none"`; dtype and device of `logprobs`.

    Raises:
        InputError: As for `kl_divergence`; or `temperature` is not > 0.

    Example:
        >>> import numpy as np
        >>> p = np.log([[0.5, 0.25, 0.25]])
        >>> print(f"{entropy(p):.6f} {entropy(p, mode='bonus'):.6f}")
        1.039721 -1.039721
        >>> print(f"{entropy(p, normalize=True):.6f}")
        0.946395

    References:
        Shannon (1948), "A mathematical theory of communication"; Williams & Peng (1991),
        "Function optimization using connectionist reinforcement learning algorithms" (bonus).
    """
    one_of("mode", mode, ("penalty", "bonus"))
    accept_reduction(reduction)
    flag("normalize", normalize)
    temperature = positive("temperature", temperature)
    xp, [logprobs], dtype = accept(logprobs=logprobs)
    axis = class_axis(axis, logprobs.ndim)
    mask = accept_mask(xp, mask, logprobs, axis)
    logprobs, axis = keep(xp, logprobs, mask, axis), axis - logprobs.ndim
    rows = by_rows(lambda x: negative_entropy_rows(xp, x, temperature, axis), [logprobs], axis)
    sign = -1.0 if mode == "penalty" else 1.0
    classes = logprobs.shape[axis]
    if normalize:
        sign = sign / math.log(classes) if classes > 1 else 0.0
    return cast(xp, sign * reduce(xp, rows, reduction, mask), dtype)


def kl_rows(
    xp: Namespace, p: Array, q: Array, direction: str, axis: int, limit: float | None
) -> Array:
    """One divergence per row, `axis` counted from the end; `consistency` shares it."""

    def formula(p: Array, q: Array) -> Array:
        if direction == "forward":
            return _kl(xp, p, q, axis, limit)
        if direction == "reverse":
            return _kl(xp, q, p, axis, limit)
        return 0.5 * (_kl(xp, p, q, axis, limit) + _kl(xp, q, p, axis, limit))

    return by_rows(formula, [p, q], axis)


def _kl(xp: Namespace, p: Array, q: Array, axis: int, limit: float | None) -> Array:
    weight = xp.exp(p)
    if limit is None:
        # Zero weight drops out whatever the ratio is, unless q is NaN, which has to be seen.
        ratio = clamp(xp, p, LOG_ZERO) - q
        ratio = xp.where((weight == 0) & ~xp.isnan(q), 0.0, ratio)
    else:
        # One finite side is enough to keep (-inf) - (-inf) away from the clamp.
        ratio = clamp(xp, p - clamp(xp, q, LOG_ZERO), -limit, limit)
    return xp.sum(weight * ratio, axis=axis)


def js_rows(xp: Namespace, p: Array, q: Array, axis: int) -> Array:
    """One divergence per row; shared with `from_logits`."""
    p, q = clamp(xp, p, LOG_ZERO), clamp(xp, q, LOG_ZERO)
    middle = logaddexp(xp, p, q) - math.log(2)
    classes = xp.exp(p) * (p - middle) + xp.exp(q) * (q - middle)
    rows = 0.5 * xp.sum(classes, axis=axis)
    # Rounding may leave p = q a little below 0: mended in the value, not in the gradient.
    return rows + constant(clamp(xp, rows, 0.0) - rows)


def negative_entropy_rows(xp: Namespace, logprobs: Array, temperature: float, axis: int) -> Array:
    """`Σ p · log p` of each row; shared with `from_logits`."""
    if temperature != 1:
        logprobs = _tempered(xp, logprobs, temperature, axis)
    logprobs = clamp(xp, logprobs, LOG_ZERO)
    return xp.sum(xp.exp(logprobs) * logprobs, axis=axis)


def _tempered(xp: Namespace, logprobs: Array, temperature: float, axis: int) -> Array:
    # A row of nothing but -inf is kept at probability 0, where softmax would give NaN.
    dead = logprobs == -math.inf
    scaled = xp.where(dead, LOG_ZERO, logprobs / temperature)
    return xp.where(dead, LOG_ZERO, log_softmax(xp, scaled, axis))
