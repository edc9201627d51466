"""KL divergence, Jensen-Shannon divergence and entropy, from log-probabilities."""

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
from steelyard.penalties._checks import class_axis, flag, one_of, positive, warn_above_zero
from steelyard.penalties._reduction import accept_mask, accept_reduction, by_rows, keep, reduce
from steelyard.penalties.primitives import Reduction

# Finite stand-in for log 0: exp(LOG_ZERO) is 0, and 0 · LOG_ZERO is 0 where 0 · (-inf) is NaN. A
# clamp to it has gradient 0 below, so that a class of probability 0 drops out of value and
# gradient. -1e30 fits into float32; narrower floats have been widened before.
LOG_ZERO = -1e30
MAX_LOG_RATIO = 100.0  # the log ratio of a KL divergence is clamped to ± this number by default


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
    `"symmetric"` is `½ KL(p‖q) + ½ KL(q‖p)`; never below 0 for normalised distributions. A class
    whose weighting probability (p forward, q reverse) is zero contributes 0 to value and
    gradient, also where both log-probabilities are -inf.

    Args:
        p: Log-probabilities, classes on `axis`; for example `[batch, sequence, vocabulary]`.
            Values above 0 are warned of where that costs little: NumPy, and torch on the CPU.
        q: The same shape as `p`.
        direction: `"forward"`, `"reverse"` or `"symmetric"`.
        reduction: `"sum"`, `"mean"`, or `"none"` for one value per row.
        axis: The axis of the classes.
        mask: Booleans over rows (the shape without `axis`, or broadcasting to it); a False row
            counts in neither value, mean denominator nor gradient. All False gives 0.
        max_log_ratio: The log ratio is clamped to ± this number, with gradient 0 outside.
            `None` gives the exact value, which may be infinite.

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
    p, q, axis = keep(xp, p, mask, axis), keep(xp, q, mask, axis), axis - p.ndim
    warn_above_zero(p=p, q=q)
    rows = by_rows(lambda p, q: kl_rows(xp, p, q, direction, axis, limit), [p, q], axis)
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

    `½ KL(p‖m) + ½ KL(q‖m)` with `m = ½(p + q)`, computed in log space. A class with p = 0 (or
    q = 0) contributes 0 to the first (or second) summand and its gradient.

    Args:
        p: Log-probabilities, classes on `axis`, as in `kl_divergence`.
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
    warn_above_zero(p=p, q=q)
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
    """Shannon entropy as a penalty (+H) or a bonus (-H).

    `H = -Σᵢ pᵢ · log pᵢ`, in nats. `"penalty"` returns +H: adding it to a loss lowers entropy.
    `"bonus"` returns -H: adding it raises entropy (exploration). Log-probabilities of -inf
    contribute 0 to value and gradient.

    Args:
        logprobs: Log-probabilities, classes on `axis`, as in `kl_divergence`.
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
    if temperature == 1:  # else they are normalised below
        warn_above_zero(logprobs=logprobs)
    rows = by_rows(lambda x: negative_entropy_rows(xp, x, temperature, axis), [logprobs], axis)
    sign = -1.0 if mode == "penalty" else 1.0
    classes = logprobs.shape[axis]
    if normalize:
        sign = sign / math.log(classes) if classes > 1 else 0.0
    return cast(xp, sign * reduce(xp, rows, reduction, mask), dtype)


def kl_rows(
    xp: Namespace, p: Array, q: Array, direction: str, axis: int, limit: float | None
) -> Array:
    """KL divergence of each row in the given direction; `axis` is negative."""
    if direction == "forward":
        return _kl(xp, p, q, axis, limit)
    if direction == "reverse":
        return _kl(xp, q, p, axis, limit)
    return 0.5 * (_kl(xp, p, q, axis, limit) + _kl(xp, q, p, axis, limit))


def _kl(xp: Namespace, p: Array, q: Array, axis: int, limit: float | None) -> Array:
    """`Σ exp(p) · clamp(p - q, ±limit)` over `axis`, with `p` and `q` log-probabilities."""
    weight = xp.exp(p)
    if limit is None:
        # A class with p = 0 has log ratio -inf - log q; it is replaced by 0, so that neither
        # 0 · inf nor its gradient is NaN. A NaN in q is left in, so that it stays visible.
        ratio = clamp(xp, p, LOG_ZERO) - q
        ratio = xp.where((weight == 0) & ~xp.isnan(q), 0.0, ratio)
    else:
        # Making one side finite suffices: (-inf) - (-inf) would be NaN, while ±inf is clamped
        # to ±limit, where the gradient through the ratio is 0 and 0 · (±limit) is 0.
        ratio = clamp(xp, p - clamp(xp, q, LOG_ZERO), -limit, limit)
    return xp.sum(weight * ratio, axis=axis)


def js_rows(xp: Namespace, p: Array, q: Array, axis: int) -> Array:
    """Jensen-Shannon divergence of each row of log-probabilities.

    `log m = log ½(p + q) = logaddexp(log p, log q) - log 2` never leaves log space, so that
    probabilities that underflow do not give log 0.
    """
    p, q = clamp(xp, p, LOG_ZERO), clamp(xp, q, LOG_ZERO)
    log_m = logaddexp(xp, p, q) - math.log(2)
    classes = xp.exp(p) * (p - log_m) + xp.exp(q) * (q - log_m)
    rows = 0.5 * xp.sum(classes, axis=axis)
    # Rounding may leave p = q slightly below 0. The value is corrected by a constant: a clamp
    # would cut the gradient as well.
    return rows + constant(clamp(xp, rows, 0.0) - rows)


def negative_entropy_rows(xp: Namespace, logprobs: Array, temperature: float, axis: int) -> Array:
    """`Σ p · log p` of each row."""
    if temperature != 1:
        logprobs = _apply_temperature(xp, logprobs, temperature, axis)
    logprobs = clamp(xp, logprobs, LOG_ZERO)
    return xp.sum(xp.exp(logprobs) * logprobs, axis=axis)


def _apply_temperature(xp: Namespace, logprobs: Array, temperature: float, axis: int) -> Array:
    """`log_softmax(logprobs / T)`, with classes of probability 0 kept at `LOG_ZERO`."""
    # In a row whose classes are all -inf, log_softmax alone would give NaN.
    zero = logprobs == -math.inf
    scaled = xp.where(zero, LOG_ZERO, logprobs / temperature)
    return xp.where(zero, LOG_ZERO, log_softmax(xp, scaled, axis))
