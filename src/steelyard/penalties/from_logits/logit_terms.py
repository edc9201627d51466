"""Entropy, divergences and likelihoods of whole distributions, computed from logits."""

from __future__ import annotations

from typing import Literal

from steelyard.penalties._arrays import Array
from steelyard.penalties._reduction import accept_reduction
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    JS,
    Z_LOSS,
    entropy_components,
    kl_components,
    single_component,
)
from steelyard.penalties.from_logits._evaluate import weighted_total
from steelyard.penalties.from_logits.projection import Projection, accept
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
            contributes 0 to value and gradient. Or a `Projection`, whose logits are computed one
            chunk of rows at a time.
        mode: `"penalty"` gives +H, `"bonus"` gives -H.
        reduction: `"mean"` or `"sum"` over rows, or `"none"` for one value per row.
        normalize: Divide by the log of the number of classes; one class gives 0.
        temperature: T > 0.
        mask: Booleans over rows (the leading shape, or broadcasting to it); where false, the
            row counts in neither value, mean nor gradient, and is not read.

    Returns:
        A scalar, or the leading shape for `"none"`; float32, or float64 for float64 logits.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative is requested in torch.

    Example:
        >>> import numpy as np
        >>> print(f"{entropy(np.log([[0.5, 0.25, 0.25]])):.6f}")
        1.039721
    """
    accept_reduction(reduction)
    rows = accept(logits, mask=mask)
    components = entropy_components(
        rows.classes, mode=mode, normalize=normalize, temperature=temperature
    )
    return weighted_total(rows, components, reduction)


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
        reference: Logits of the same shape, or a `Projection`. It is a constant if it or `logits`
            is a `Projection`.
        direction: `"forward"`, `"reverse"` or `"symmetric"`.
        reduction: As for `entropy`.
        temperature: T > 0, of both.
        mask: As for `entropy`.
        max_log_ratio: Limit of the log ratio in either direction; outside of it the gradient
            is 0; `None` gives the exact value, which may be infinite.

    Returns:
        As for `entropy`.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative is requested in torch.

    Example:
        >>> import numpy as np
        >>> p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
        >>> print(f"{kl(p, q):.6f} {kl(p, q, direction='reverse'):.6f}")
        0.143841 0.130812
    """
    accept_reduction(reduction)
    components = kl_components(
        direction=direction, temperature=temperature, max_log_ratio=max_log_ratio
    )
    return weighted_total(accept(logits, reference, mask=mask), components, reduction)


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
        reference: Logits of the same shape, or a `Projection`. It is a constant if it or `logits`
            is a `Projection`.
        reduction: As for `entropy`.
        temperature: T > 0, of both.
        mask: As for `entropy`.

    Returns:
        As for `entropy`; each row between 0 and log 2.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative is requested in torch.

    Example:
        >>> import numpy as np
        >>> p, q = np.array([[0.0, -np.inf]]), np.array([[-np.inf, 0.0]])
        >>> print(f"{js(p, q):.6f}")
        0.693147
    """
    accept_reduction(reduction)
    rows = accept(logits, reference, mask=mask)
    return weighted_total(rows, single_component(JS, temperature=temperature), reduction)


def z_loss(
    logits: Array | Projection,
    *,
    reduction: Reduction = "mean",
    temperature: float = 1.0,
    mask: Array | None = None,
) -> Array:
    """Squared logsumexp of `logits / T`, which keeps the logits from drifting.

    Args:
        logits: Any leading shape, classes last; or a `Projection`.
        reduction: As for `entropy`.
        temperature: T > 0.
        mask: As for `entropy`.

    Returns:
        As for `entropy`.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative is requested in torch.

    Example:
        >>> import numpy as np
        >>> print(f"{z_loss(np.log([[1.0, 3.0]])):.6f} {np.log(4) ** 2:.6f}")
        1.921812 1.921812

    References:
        Chowdhery et al. (2022), "PaLM: scaling language modeling with pathways", section 5.
    """
    accept_reduction(reduction)
    return weighted_total(
        accept(logits, mask=mask), single_component(Z_LOSS, temperature=temperature), reduction
    )


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
        targets: Integers in the leading shape. Those of masked rows are not read. A target that is
            no class raises an error; on a GPU and in JAX the loss is NaN.
        reduction: As for `entropy`.
        temperature: T > 0.
        mask: As for `entropy`.

    Returns:
        As for `entropy`.

    Raises:
        InputError: The arrays or an option break a rule.
        GradientError: A second derivative is requested in torch.

    Example:
        >>> import numpy as np
        >>> print(f"{cross_entropy(np.log([[0.25, 0.75]]), np.array([0])):.6f}")
        1.386294
    """
    accept_reduction(reduction)
    rows = accept(logits, targets=targets, mask=mask)
    return weighted_total(rows, single_component(CROSS_ENTROPY, temperature=temperature), reduction)


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
        GradientError: A second derivative is requested in torch.

    Example:
        >>> import numpy as np
        >>> print(target_logprobs(np.log([[0.25, 0.75]]), np.array([1])).round(6))
        [-0.287682]
    """
    [(component, _)] = single_component(CROSS_ENTROPY, temperature=temperature)
    rows = accept(logits, targets=targets, mask=mask)
    return weighted_total(rows, [(component, -1.0)], "none")
