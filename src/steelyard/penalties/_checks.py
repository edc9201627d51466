"""Checks of options and values: `validate` raises on NaN and infinity."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from steelyard.errors import InputError, NonFiniteError
from steelyard.penalties._arrays import Array, accept, is_jax_tracer, is_numpy, is_torch

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
    if is_jax_tracer(x):
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


_INFINITY = float("inf")


# The checks take `Any`: the type of the value is part of what they check.
def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise InputError(f"{name} must be one of {choices}, got {value!r}.")
    return value


def number(name: str, value: Any, rule: str = "a finite number") -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.integer | np.floating)
        or not -_INFINITY < value < _INFINITY
    ):
        raise InputError(f"{name} must be {rule}, got {value!r}.")
    return float(value)


def positive(name: str, value: Any, rule: str = "a finite number > 0") -> float:
    checked = number(name, value, rule)
    if checked <= 0:
        raise InputError(f"{name} must be {rule}, got {value!r}.")
    return checked


def fraction(name: str, value: Any) -> float:
    rule = "a number in [0, 1]"
    checked = number(name, value, rule)
    if not 0 <= checked <= 1:
        raise InputError(f"{name} must be {rule}, got {value!r}.")
    return checked


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}.")
    return value


def class_axis(value: Any, rank: int) -> int:
    """Check the axis that holds the classes or components; return it as an index >= 0."""
    if rank == 0:
        raise InputError(
            "the array must have at least one axis (axis holds the classes), got shape ()."
        )
    if isinstance(value, bool) or not isinstance(value, int) or not -rank <= value < rank:
        raise InputError(
            f"axis must be an integer in [{-rank}, {rank - 1}] for an array of rank {rank}, "
            f"got {value!r}."
        )
    return value % rank


# Rounded log-probabilities may lie above 0, in bfloat16 by 1/256; so do finite differences.
TOLERANCE = 0.01


def warn_above_zero(**arrays: Array) -> None:
    """Warn of an array with values above 0, where the result means nothing.

    Only NumPy arrays and torch tensors in the memory of the CPU are checked, and no tensor inside
    `torch.compile` or `vmap`: there a look at a value would wait for a device or break a graph.
    JAX arrays are not checked. The check takes about 1 % of the time of a penalty and its gradient.
    """
    for name, x in arrays.items():
        largest = _largest(x)
        if TOLERANCE < largest < math.inf:
            warnings.warn(
                f"{name} must hold log-probabilities, at most 0, got values up to {largest:.4g}; "
                f"pass the logarithm of probabilities, and logits after a log-softmax.",
                stacklevel=3,  # the caller of the penalty
            )


def _largest(x: Array) -> float:
    """Largest element, or NaN if it is unknown."""
    if math.prod(x.shape) == 0:
        return math.nan
    if is_numpy(x):
        return float(x.max())
    if is_torch(x) and x.device.type == "cpu":
        import torch  # noqa: PLC0415  # installed: a tensor was passed

        # Subclasses, such as distributed tensors, would communicate.
        plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
        if plain and not torch.compiler.is_compiling():
            with contextlib.suppress(RuntimeError):  # vmap knows no single value
                return float(x.detach().amax())
    return math.nan
