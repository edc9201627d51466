"""`validate`: raise on NaN and infinity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn, TypeVar

from steelyard.errors import InputError, NonFiniteError
from steelyard.penalties._arrays import accept, is_traced

if TYPE_CHECKING:
    from typing import Literal

    from steelyard.penalties._arrays import Array, Namespace


ArrayT = TypeVar("ArrayT")


def validate(x: ArrayT) -> ArrayT:
    """Return `x` itself if all its values are finite, else raise.

    Penalties propagate NaN and infinity, so that they stay visible; this function stops them. It
    needs the values, so call it outside `jax.jit` and `torch.compile`.

    Args:
        x: Any shape.

    Returns:
        The same object.

    Raises:
        NonFiniteError: A value is NaN (`kind="nan"`, tested first) or infinite (`kind="inf"`).
        InputError: `x` is not a floating-point array, or is traced and has no values yet.

    Example:
        >>> import numpy as np
        >>> print(validate(np.array([1.0, 2.0])))
        [1. 2.]
        >>> validate(np.array([1.0, np.inf]))
        Traceback (most recent call last):
            ...
        steelyard.errors.NonFiniteError: x must be finite, got inf in 1 of 2 values, first at \
index (1,); look at what produced it.

    References:
        IEEE 754-2019, "Standard for floating-point arithmetic", sections 6.1 and 6.2.
    """
    xp, [values], _ = accept(x=x)
    if is_traced(x):
        raise InputError(
            "x must have values to read, got a traced array; call validate outside jax.jit, "
            "jax.grad and jax.vmap."
        )
    if not bool(xp.all(xp.isfinite(values))):
        nan = xp.isnan(values)
        if bool(xp.any(nan)):
            _raise_non_finite(xp, nan, "nan")
        _raise_non_finite(xp, xp.isinf(values), "inf")
    return x


def _raise_non_finite(xp: Namespace, bad: Array, kind: Literal["nan", "inf"]) -> NoReturn:
    positions = xp.nonzero(xp.reshape(bad, (-1,)))[0]
    index = _unravel(int(positions[0]), tuple(bad.shape))
    raise NonFiniteError(
        f"x must be finite, got {kind} in {positions.shape[0]} of {math.prod(bad.shape)} values, "
        f"first at index {index}; look at what produced it.",
        kind=kind,
    )


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Index of a row-major position, as `numpy.unravel_index`."""
    index: list[int] = []
    for size in reversed(shape):
        position, coordinate = divmod(position, size)
        index.insert(0, coordinate)
    return tuple(index)
