"""Penalties on relations: orthogonality of rows, agreement of two arrays."""

from __future__ import annotations

import math
from typing import Literal

from steelyard.errors import InputError
from steelyard.penalties._arrays import (
    Array,
    Namespace,
    absolute,
    accept,
    cast,
    constant,
    floored_norm,
    gram_of_rows,
    identity,
)
from steelyard.penalties._checks import class_axis, flag, one_of, warn_above_zero
from steelyard.penalties._reduction import accept_mask, accept_reduction, by_rows, keep, reduce
from steelyard.penalties.divergences import MAX_LOG_RATIO, kl_rows
from steelyard.penalties.primitives import Reduction

_NORM_FLOOR = 1e-8


def orthogonality(
    x: Array,
    *,
    mode: Literal["soft", "hard", "spectral"] = "soft",
    normalize: bool = True,
    axis: Literal["rows", "sequence", "vocabulary"] = "rows",
) -> Array:
    """Deviation of the rows of a matrix from orthogonality; 0 for orthonormal rows.

    With M `[n, m]` and the Gram matrix `G = M Mᵀ` `[n, n]` of its rows: `"soft"` is
    `Σ_{i≠j} G²ᵢⱼ`, `"hard"` is `Σ (G - I)²`, `"spectral"` is the largest absolute eigenvalue of
    `G - I`. `"soft"` and `"hard"` are sums over pairs of rows, not means.

    Args:
        x: Rank 2 or more for `axis="rows"`; `[n, m]` or `[batch, sequence, vocabulary]` else.
        mode: `"soft"` ignores the lengths of rows; `"hard"` also penalises lengths other than 1;
            `"spectral"` replaces the squared Frobenius norm of `"hard"` by the spectral norm.
        normalize: Divide rows by their L2 norm (at least 1e-8) first. Zero rows stay zero
            with a finite gradient.
        axis: Layout of M. `"rows"`: rows along the last axis, leading axes flattened.
            `"sequence"`: `[b, s, v]` becomes `[s, b·v]`, a matrix stays. `"vocabulary"`:
            `[b, s, v]` becomes `[v, b·s]`, a matrix is transposed.

    Returns:
        A scalar; dtype and device of `x`.

    Raises:
        InputError: `x` is not floating-point, has the wrong rank or no row; an option is not
            allowed.

    Example:
        >>> import numpy as np
        >>> x = np.array([[1.0, 0.0], [1.0, 1.0]])
        >>> print(f"{orthogonality(x):.6f} {orthogonality(x, normalize=False):.6f}")
        1.000000 2.000000

    References:
        Bansal, Chen & Wang (2018), "Can we gain more from orthogonality regularizations in
        training deep networks?".
    """
    one_of("mode", mode, ("soft", "hard", "spectral"))
    flag("normalize", normalize)
    one_of("axis", axis, ("rows", "sequence", "vocabulary"))
    xp, [x], dtype = accept(x=x)
    rows = _matrix(xp, x, axis)
    products = _unit_gram(xp, rows) if normalize else gram_of_rows(xp, rows)
    unit = identity(xp, products)
    if mode == "soft":
        result = xp.sum(xp.square(xp.where(unit == 1, 0.0, products)))
    elif mode == "hard":
        result = xp.sum(xp.square(products - unit))
    else:
        # G - I is symmetric, so its spectral norm is max |λ|. eigvalsh sorts ascending: the
        # largest absolute eigenvalue is the last one or minus the first. Only eigenvalues are
        # differentiated, dλ = vᵀ dG v, which stays finite where eigenvalues coincide.
        eigenvalues = xp.linalg.eigvalsh(products - unit)
        result = xp.maximum(eigenvalues[-1], -eigenvalues[0])
    return cast(xp, result, dtype)


def consistency(
    a: Array,
    b: Array,
    *,
    metric: Literal["mse", "l1", "cosine", "kl"] = "mse",
    reduction: Reduction = "mean",
    axis: int = -1,
    mask: Array | None = None,
) -> Array:
    """Disagreement of two arrays, such as predictions under two augmentations; 0 if equal.

    `"mse"` is `(a - b)²` and `"l1"` is `|a - b|`, element by element. `"cosine"` is
    `1 - a·b / (‖a‖₂ ‖b‖₂)`, each norm at least 1e-8, and `"kl"` is
    `½ KL(a‖b) + ½ KL(b‖a)`, the symmetric `kl_divergence` with the log ratio clamped to ±100;
    both row by row along `axis`. The gradient flows into both arrays.

    Args:
        a: Any shape; log-probabilities for `"kl"`.
        b: The same shape as `a`.
        metric: `"mse"`, `"l1"`, `"cosine"` or `"kl"`.
        reduction: `"sum"`, `"mean"`, or `"none"` for one value per element or row.
        axis: Axis along which a row lies; not used by `"mse"` and `"l1"`.
        mask: Booleans over elements (`"mse"`, `"l1"`) or rows (`"cosine"`, `"kl"`); a False
            element or row counts in neither value, mean denominator nor gradient.

    Returns:
        A scalar, or one value per element or row for `"none"`; dtype and device of the inputs.

    Raises:
        InputError: The arrays are not floating-point or differ in shape; an option is not
            allowed; the mask is not boolean or does not broadcast.

    Example:
        >>> import numpy as np
        >>> a, b = np.array([[1.0, 0.0]]), np.array([[1.0, 1.0]])
        >>> print(consistency(a, b), f"{consistency(a, b, metric='cosine'):.6f}")
        0.5 0.292893

    References:
        Xie et al. (2020), "Unsupervised data augmentation for consistency training".
    """
    one_of("metric", metric, ("mse", "l1", "cosine", "kl"))
    accept_reduction(reduction)
    xp, [a, b], dtype = accept(a=a, b=b)
    row_axis = class_axis(axis, a.ndim) if metric in ("cosine", "kl") else None
    mask = accept_mask(xp, mask, a, row_axis)
    a, b = keep(xp, a, mask, row_axis), keep(xp, b, mask, row_axis)
    if row_axis is None:
        values = xp.square(a - b) if metric == "mse" else absolute(xp, a - b)
        return cast(xp, reduce(xp, values, reduction, mask), dtype)
    axis = row_axis - a.ndim
    if metric == "kl":
        warn_above_zero(a=a, b=b)

    def disagreement(a: Array, b: Array) -> Array:
        if metric == "cosine":
            return 1.0 - xp.sum(_unit(xp, a, axis) * _unit(xp, b, axis), axis=axis)
        return kl_rows(xp, a, b, "symmetric", axis, MAX_LOG_RATIO)

    values = by_rows(disagreement, [a, b], axis)
    return cast(xp, reduce(xp, values, reduction, mask), dtype)


def _matrix(xp: Namespace, x: Array, axis: str) -> Array:
    """Arrange `x` as the matrix M, `[n, m]`, whose n rows are compared."""
    allowed = "at least 2" if axis == "rows" else "2 or 3"
    if x.ndim < 2 or (axis != "rows" and x.ndim > 3):  # noqa: PLR2004
        raise InputError(
            f"x must have rank {allowed} for axis={axis!r}, got shape {tuple(x.shape)}; "
            "reshape it first."
        )
    if x.ndim == 2:  # noqa: PLR2004
        rows = xp.permute_dims(x, (1, 0)) if axis == "vocabulary" else x
    elif axis == "rows":
        rows = x
    else:
        rows = xp.permute_dims(x, (1, 0, 2) if axis == "sequence" else (2, 0, 1))
    if 0 in rows.shape:
        raise InputError(f"x must not be empty, got shape {tuple(x.shape)}.")
    return xp.reshape(rows, (-1, x.shape[-1]) if axis == "rows" else (rows.shape[0], -1))


def _unit(xp: Namespace, x: Array, axis: int) -> Array:
    """`x / max(‖x‖₂, 1e-8)` along `axis`."""
    scaled, floor = _rescale(xp, x, axis)
    return scaled / floored_norm(xp, scaled, axis, floor)


def _unit_gram(xp: Namespace, rows: Array) -> Array:
    """Gram matrix of the normalised rows: `Gᵢⱼ = mᵢ·mⱼ / (max(‖mᵢ‖, 1e-8) · max(‖mⱼ‖, 1e-8))`.

    The `[n, n]` products are divided instead of the `[n, m]` rows, which are usually many times
    as large; the squared norms are already on the diagonal of the products.
    """
    scaled, floor = _rescale(xp, rows, 1)
    products, lowest = gram_of_rows(xp, scaled), xp.square(floor)
    squares = xp.sum(products * identity(xp, products), axis=1, keepdims=True)
    norms = xp.sqrt(xp.where(squares < lowest, lowest, squares))
    return products / (norms * xp.matrix_transpose(norms))


def _rescale(xp: Namespace, x: Array, axis: int) -> tuple[Array, Array]:
    """Divide by the largest absolute element along `axis`, so that squares cannot overflow.

    Normalisation does not depend on the scale, so the scale is a constant in the gradient.

    Returns:
        The rescaled array, and the norm floor 1e-8 in the same scale.
    """
    largest = xp.linalg.vector_norm(constant(x), axis=axis, keepdims=True, ord=math.inf)
    scale = xp.where(largest < _NORM_FLOOR, _NORM_FLOOR, largest)
    return x / scale, _NORM_FLOOR / scale
