"""Entropy, divergences and likelihoods of whole distributions, straight from logits."""

from __future__ import annotations

from typing import Literal

from steelyard.penalties._arrays import Array
from steelyard.penalties._reduction import accept_reduction
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    JS,
    Z_LOSS,
    of_entropy,
    of_kl,
    of_one,
)
from steelyard.penalties.from_logits._evaluate import evaluated
from steelyard.penalties.from_logits._projection_inputs import accept
from steelyard.penalties.from_logits.projection import Projection
from steelyard.penalties.primitives import Reduction


def entropy(
    logits: Array | Projection,
    *,
    mode: Literal["penalty", "bonus"] = "penalty",
    reduction: Reduction = "mean",
    normalize: bool = False,
    temperature: float = 1.0,
    mask: Array | None = None,
) -> Array:
    """Shannon entropy of `softmax(logits / T)`, signed as in `steelyard.penalties.entropy`.

    Args:
        logits: Any leading shape, classes last. -inf is a class of probability 0, which
            contributes 0 to value and gradient. Or a `Projection`, whose logits are made a chunk
            of rows at a time.
        mode: `"penalty"` gives +H, `"bonus"` gives -H.
        reduction: `"mean"` or `"sum"` over rows, or `"none"` for one value per row.
        normalize: Divide by the log of the number of classes; one class gives 0.
        temperature: T > 0.
        mask: Booleans over rows (the leading shape, or broadcasting to it); where false, the
            row counts in neither value, mean nor gradient, and is not looked at.

    Returns:
        A scalar, or the leading shape for `"none"`; float32, or float64 for float64 logits.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative of it in torch.

    Example:
        >>> import numpy as np
        >>> print(f"{entropy(np.log([[0.5, 0.25, 0.25]])):.6f}")
        1.039721
    """
    accept_reduction(reduction)
    rows = accept(logits, mask=mask)
    parts = of_entropy(rows.classes, mode=mode, normalize=normalize, temperature=temperature)
    return evaluated(rows, parts, reduction)


def kl(
    logits: Array | Projection,
    reference: Array | Projection,
    *,
    direction: Literal["forward", "reverse", "symmetric"] = "forward",
    reduction: Reduction = "mean",
    temperature: float = 1.0,
    mask: Array | None = None,
    max_log_ratio: float | None = 100.0,
) -> Array:
    """Kullback-Leibler divergence of `p = softmax(logits / T)` and `q` of the reference's.

    `"forward"` is `KL(p‖q)`, `"reverse"` `KL(q‖p)`, `"symmetric"` their mean, all as in
    `steelyard.penalties.kl_divergence`. Differentiable by both arrays.

    Args:
        logits: Any leading shape, classes last; or a `Projection`.
        reference: Logits of the same shape. Or a `Projection` of it; then, and beside logits
            that are one, it is constant.
        direction: `"forward"`, `"reverse"` or `"symmetric"`.
        reduction: As for `entropy`.
        temperature: T > 0, of both.
        mask: As for `entropy`.
        max_log_ratio: Limit of the log ratio in either direction, beyond which its gradient
            is 0; `None` gives the exact value, which may be infinite.

    Returns:
        As for `entropy`.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative of it in torch.

    Example:
        >>> import numpy as np
        >>> p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
        >>> print(f"{kl(p, q):.6f} {kl(p, q, direction='reverse'):.6f}")
        0.143841 0.130812
    """
    accept_reduction(reduction)
    parts = of_kl(direction=direction, temperature=temperature, max_log_ratio=max_log_ratio)
    return evaluated(accept(logits, reference, mask=mask), parts, reduction)


def js(
    logits: Array | Projection,
    reference: Array | Projection,
    *,
    reduction: Reduction = "mean",
    temperature: float = 1.0,
    mask: Array | None = None,
) -> Array:
    """Jensen-Shannon divergence of two softmaxes, as in `steelyard.penalties.js_divergence`.

    Args:
        logits: Any leading shape, classes last; or a `Projection`.
        reference: Logits of the same shape. Or a `Projection` of it; then, and beside logits
            that are one, it is constant.
        reduction: As for `entropy`.
        temperature: T > 0, of both.
        mask: As for `entropy`.

    Returns:
        As for `entropy`; each row between 0 and log 2.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative of it in torch.

    Example:
        >>> import numpy as np
        >>> p, q = np.array([[0.0, -np.inf]]), np.array([[-np.inf, 0.0]])
        >>> print(f"{js(p, q):.6f}")
        0.693147
    """
    accept_reduction(reduction)
    rows = accept(logits, reference, mask=mask)
    return evaluated(rows, of_one(JS, temperature=temperature), reduction)


def z_loss(
    logits: Array | Projection,
    *,
    reduction: Reduction = "mean",
    temperature: float = 1.0,
    mask: Array | None = None,
) -> Array:
    """Squared logsumexp of `logits / T`, which keeps logits from drifting.

    Args:
        logits: Any leading shape, classes last; or a `Projection`.
        reduction: As for `entropy`.
        temperature: T > 0.
        mask: As for `entropy`.

    Returns:
        As for `entropy`.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative of it in torch.

    Example:
        >>> import numpy as np
        >>> print(f"{z_loss(np.log([[1.0, 3.0]])):.6f} {np.log(4) ** 2:.6f}")
        1.921812 1.921812

    References:
        Chowdhery et al. (2022), "PaLM: scaling language modeling with pathways", section 5.
    """
    accept_reduction(reduction)
    return evaluated(accept(logits, mask=mask), of_one(Z_LOSS, temperature=temperature), reduction)


def cross_entropy(
    logits: Array | Projection,
    targets: Array,
    *,
    reduction: Reduction = "mean",
    temperature: float = 1.0,
    mask: Array | None = None,
) -> Array:
    """Minus the log-probability of each row's target.

    Args:
        logits: Any leading shape, classes last; or a `Projection`.
        targets: Integers in the leading shape. Those of masked rows are not looked at; one
            that is no class is an error, on a GPU and in JAX a loss of NaN.
        reduction: As for `entropy`.
        temperature: T > 0.
        mask: As for `entropy`.

    Returns:
        As for `entropy`.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative of it in torch.

    Example:
        >>> import numpy as np
        >>> print(f"{cross_entropy(np.log([[0.25, 0.75]]), np.array([0])):.6f}")
        1.386294
    """
    accept_reduction(reduction)
    rows = accept(logits, targets=targets, mask=mask)
    return evaluated(rows, of_one(CROSS_ENTROPY, temperature=temperature), reduction)


def target_logprobs(
    logits: Array | Projection,
    targets: Array,
    *,
    temperature: float = 1.0,
    mask: Array | None = None,
) -> Array:
    """Log-probability of each row's target, in the leading shape; 0 where masked.

    Args:
        logits: Any leading shape, classes last; or a `Projection`.
        targets: As for `cross_entropy`.
        temperature: T > 0.
        mask: As for `entropy`.

    Returns:
        The leading shape; float32, or float64 for float64 logits.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative of it in torch.

    Example:
        >>> import numpy as np
        >>> print(target_logprobs(np.log([[0.25, 0.75]]), np.array([1])).round(6))
        [-0.287682]
    """
    [(component, _)] = of_one(CROSS_ENTROPY, temperature=temperature)
    rows = accept(logits, targets=targets, mask=mask)
    return evaluated(rows, [(component, -1.0)], "none")
