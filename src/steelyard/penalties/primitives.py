"""Penalties on the magnitude of elements: of weights, activations or log-probabilities."""

from __future__ import annotations

from typing import Literal

from steelyard.penalties._arrays import Array, Namespace, absolute, accept, cast, clamp
from steelyard.penalties._checks import fraction, number, one_of, positive
from steelyard.penalties._reduction import accept_mask, accept_reduction, count, keep, reduce

Reduction = Literal["sum", "mean", "none"]


def l1(
    x: Array, *, scale: float = 1.0, reduction: Reduction = "sum", mask: Array | None = None
) -> Array:
    """Sum of absolute values; drives elements to exactly zero (lasso).

    `scale · R(|x|)`, with R the sum or mean over all elements. The gradient is
    `scale · sign(x)`, divided by their number for the mean; 0 at 0.

    Args:
        x: Any shape.
        scale: Factor of the result.
        reduction: `"sum"`, `"mean"`, or `"none"` for one value per element.
        mask: Booleans that broadcast to `x`; a False element counts in neither value, mean
            denominator nor gradient. All False gives 0. `"none"` has 0 where the mask is False.

    Returns:
        A scalar, or the shape of `x` for `"none"`; dtype and device of `x`.

    Raises:
        InputError: `x` is not a floating-point array, an option is not allowed, or the mask
            is not boolean or does not broadcast.

    Example:
        >>> import numpy as np
        >>> print(l1(np.array([1.0, -2.0, 0.0])))
        3.0
        >>> print(l1(np.array([1.0, -2.0, 0.0]), reduction="mean"))
        1.0

    References:
        Tibshirani (1996), "Regression shrinkage and selection via the lasso".
    """
    factor = number("scale", scale)
    accept_reduction(reduction)
    xp, [values], dtype = accept(x=x)
    mask = accept_mask(xp, mask, values, None)
    values = absolute(xp, keep(xp, values, mask))
    return cast(xp, factor * reduce(xp, values, reduction, mask), dtype)


def l2(
    x: Array,
    *,
    scale: float = 1.0,
    reduction: Reduction = "sum",
    mask: Array | None = None,
    clip: float | None = None,
    center: Literal["mean"] | float | None = None,
) -> Array:
    """Sum of squares; shrinks large elements most (ridge).

    `scale · R(clamp(x - c, ±clip)²)`, with R the sum or mean over all elements; no ½ and no
    root. For a constant c the gradient is `scale · 2(x - c)` inside the clip and 0 outside,
    divided by the number of elements for the mean.

    Args:
        x: Any shape.
        scale: Factor of the result.
        reduction: `"sum"`, `"mean"`, or `"none"` for one value per element.
        mask: As in `l1`. Masked elements do not count in `center="mean"` either.
        clip: Largest distance from the centre; larger ones are clamped to it, with gradient 0.
        center: c: `None` for 0, `"mean"` for the mean of `x`, which is differentiated too,
            or a number. Centring comes before clipping.

    Returns:
        A scalar, or the shape of `x` for `"none"`; dtype and device of `x`.

    Raises:
        InputError: As for `l1`; or `clip` is not a number > 0, or `center` is something else.

    Example:
        >>> import numpy as np
        >>> x = np.array([1.0, 2.0, 6.0])
        >>> print(l2(x), l2(x, center="mean"), l2(x, center="mean", clip=2.0))
        41.0 14.0 9.0

    References:
        Hoerl & Kennard (1970), "Ridge regression: biased estimation for nonorthogonal problems".
    """
    factor = number("scale", scale)
    accept_reduction(reduction)
    limit = None if clip is None else positive("clip", clip, "None or a finite number > 0")
    if isinstance(center, str):
        one_of("center", center, ("mean",))
    elif center is not None:
        center = number("center", center, "None, 'mean' or a finite number")
    xp, [values], dtype = accept(x=x)
    mask = accept_mask(xp, mask, values, None)
    values = _centred(xp, keep(xp, values, mask), center, mask)
    if limit is not None:
        values = clamp(xp, values, -limit, limit)
    return cast(xp, factor * reduce(xp, xp.square(values), reduction, mask), dtype)


def elastic_net(
    x: Array,
    *,
    scale: float = 1.0,
    reduction: Reduction = "sum",
    mask: Array | None = None,
    l1_ratio: float = 0.5,
) -> Array:
    """Mixture of `l1` and `l2`: sparse, but keeps correlated elements together.

    `scale · (r · R(|x|) + (1 - r) · R(x²))`, with r the `l1_ratio` and R the sum or mean over all
    elements. scikit-learn has ½x² instead of x², so its ratio does not carry over.

    Args:
        x: Any shape.
        scale: Factor of the result.
        reduction: `"sum"`, `"mean"`, or `"none"` for one value per element.
        mask: As in `l1`.
        l1_ratio: Weight r of `l1`, in [0, 1].

    Returns:
        A scalar, or the shape of `x` for `"none"`; dtype and device of `x`.

    Raises:
        InputError: As for `l1`; or `l1_ratio` is outside [0, 1].

    Example:
        >>> import numpy as np
        >>> print(elastic_net(np.array([1.0, -2.0]), l1_ratio=0.25))
        4.5

    References:
        Zou & Hastie (2005), "Regularization and variable selection via the elastic net".
    """
    factor = number("scale", scale)
    accept_reduction(reduction)
    ratio = fraction("l1_ratio", l1_ratio)
    xp, [values], dtype = accept(x=x)
    mask = accept_mask(xp, mask, values, None)
    values = keep(xp, values, mask)
    # A summand of weight 0 is left out: 0 · R(x²) is NaN where the square overflows.
    summands = []
    if ratio > 0:
        summands.append(ratio * reduce(xp, absolute(xp, values), reduction, mask))
    if ratio < 1:
        summands.append((1 - ratio) * reduce(xp, xp.square(values), reduction, mask))
    return cast(xp, factor * sum(summands[1:], summands[0]), dtype)


def _centred(xp: Namespace, x: Array, center: str | float | None, mask: Array | None) -> Array:
    if center is None:
        return x
    # Masked elements are 0 in `x`, so the sum runs over the unmasked ones alone. The mean is not
    # detached: its gradient subtracts the mean of the gradients from each of them.
    centre = xp.sum(x) / count(xp, x, mask) if isinstance(center, str) else center
    return x - centre
