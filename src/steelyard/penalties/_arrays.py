"""What NumPy, torch and JAX arrays do differently, so that a formula is written once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, is_jax_array

from steelyard.errors import InputError

# The array-API standard has no static type yet, so an array and its namespace are `Any`.
Array: TypeAlias = Any
Namespace: TypeAlias = Any

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_NARROW = ("float16", "bfloat16")
_NUMPY = (np.ndarray, np.generic)  # a tuple: Dynamo does not know `|` of types


def is_torch(x: object) -> bool:
    """Tell torch tensors apart without importing torch.

    array-api-compat's own test sits behind `lru_cache`, which Dynamo warns about: it is
    asked only about what has a dtype and is no tensor.
    """
    return hasattr(type(x), "__torch_function__")


def is_jax(x: object) -> bool:
    return hasattr(x, "dtype") and not is_torch(x) and bool(is_jax_array(x))


def is_numpy(x: object) -> bool:
    return isinstance(x, _NUMPY)


def is_traced(x: object) -> bool:
    """Tell whether `x` has no values to read, being inside a JAX transformation."""
    if not is_jax(x):
        return False
    import jax  # noqa: PLC0415  # only ever reached with a JAX array in hand

    return isinstance(x, jax.core.Tracer)


def namespace(**arrays: Array) -> Namespace:
    if all(is_torch(x) for x in arrays.values()):
        import array_api_compat.torch as xp  # noqa: PLC0415  # needs torch, which a tensor proves

        return xp
    # Python numbers are looked for here, since array_namespace passes over them.
    if all(hasattr(x, "dtype") for x in arrays.values()):
        with contextlib.suppress(TypeError):
            return array_namespace(*arrays.values())
    kinds = ", ".join(f"{name}: {type(x).__qualname__}" for name, x in arrays.items())
    raise InputError(
        f"{_and(arrays)} must be NumPy, torch or JAX arrays, all of one kind, got {kinds}; "
        "convert them first, for example with numpy.asarray or torch.as_tensor."
    )


def accept(**arrays: Array) -> tuple[Namespace, list[Array], Any]:
    """Check that the arrays are floating and of one shape.

    Returns:
        The namespace, the arrays (float16 and bfloat16 widened to float32, in which sums
        are accumulated) and the dtype the result is to have.
    """
    xp = namespace(**arrays)
    for name, x in arrays.items():
        if dtype_name(x) not in _FLOATS:
            raise InputError(
                f"{name} must hold floating-point numbers ({', '.join(_FLOATS)}), "
                f"got {dtype_name(x)}; cast it first."
            )
    given = list(arrays.values())
    if any(tuple(x.shape) != tuple(given[0].shape) for x in given):
        shapes = ", ".join(f"{name}: {tuple(x.shape)}" for name, x in arrays.items())
        raise InputError(
            f"{_and(arrays)} must have the same shape, got {shapes}; broadcast them first."
        )
    return xp, [widen(xp, x) for x in given], common_dtype(xp, given)


def common_dtype(xp: Namespace, arrays: Sequence[Array]) -> Any:  # each backend's own class
    """The dtype that holds them all; Dynamo cannot trace `torch.result_type`."""
    names = {dtype_name(x) for x in arrays}
    if len(names) == 1:
        return arrays[0].dtype
    return xp.float64 if "float64" in names else xp.float32


def dtype_name(x: Array) -> str:
    return str(x.dtype).rpartition(".")[2]


def is_array(x: object) -> bool:
    return is_torch(x) or is_jax(x) or is_numpy(x)


def is_floating(x: object) -> bool:
    """Tell whether `x` is an array that can have a gradient."""
    return is_array(x) and dtype_name(x) in _FLOATS


def widen(xp: Namespace, x: Array) -> Array:
    return xp.astype(x, xp.float32) if dtype_name(x) in _NARROW else x


def cast(xp: Namespace, x: Array, dtype: Any) -> Array:  # dtype: each backend has its own class
    return xp.astype(x, dtype, copy=False)


def absolute(xp: Namespace, x: Array) -> Array:
    """Absolute value whose gradient at 0 is 0; `jax.grad(jnp.abs)(0.)` is 1."""
    return xp.where(x == 0, 0.0, xp.abs(x)) if is_jax(x) else xp.abs(x)


def clamp(xp: Namespace, x: Array, low: float, high: float | None = None) -> Array:
    """Limit `x`, with gradient 1 on the limits and 0 outside; NaN stays.

    `jnp.clip` halves the gradient on a limit; torch has one kernel for all of it.
    """
    if is_torch(x):
        return x.clamp(low, high)
    x = xp.where(x < low, low, x)
    return x if high is None else xp.where(x > high, high, x)


def root(xp: Namespace, x: Array) -> Array:
    """Square root with gradient 0 at 0, where the true one is infinite."""
    positive = x != 0  # not `> 0`: NaN has to come through
    return xp.where(positive, xp.sqrt(xp.where(positive, x, 1.0)), 0.0)


def floored_norm(xp: Namespace, x: Array, axis: int, floor: Array) -> Array:
    """L2 norm along `axis`, at least `floor`, with a finite gradient at 0.

    torch has that gradient in its fused norm; `jnp.linalg.norm` has NaN.
    """
    if is_torch(x):
        norm = xp.linalg.vector_norm(x, axis=axis, keepdims=True)
        return xp.where(norm < floor, floor, norm)
    square, least = xp.sum(xp.square(x), axis=axis, keepdims=True), xp.square(floor)
    return xp.sqrt(xp.where(square < least, least, square))


def log_softmax(xp: Namespace, x: Array, axis: int) -> Array:
    if is_torch(x):
        return x.log_softmax(axis)
    shifted = x - constant(xp.max(x, axis=axis, keepdims=True))
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))


def logaddexp(xp: Namespace, x: Array, y: Array) -> Array:
    if is_numpy(x):
        with np.errstate(invalid="ignore"):  # it warns of a NaN that only passes through
            return np.logaddexp(x, y)
    return xp.logaddexp(x, y)


def gram(xp: Namespace, rows: Array) -> Array:
    """All inner products of the rows, in their own precision.

    Autocast (torch) and the default matmul precision of accelerators (JAX) would round
    the factors to bfloat16 or TF32.
    """
    if is_torch(rows):
        import torch  # noqa: PLC0415  # a tensor proves that it is there

        with torch.autocast(rows.device.type, enabled=False):
            return rows @ rows.mT
    if is_jax(rows):
        return xp.matmul(rows, xp.matrix_transpose(rows), precision="highest")
    return rows @ xp.matrix_transpose(rows)


def identity(xp: Namespace, like: Array) -> Array:
    """The identity matrix of the size, dtype and device of a square one."""
    if is_torch(like):
        import torch  # noqa: PLC0415  # a tensor proves that it is there

        return torch.eye(like.shape[0], dtype=like.dtype, device=like.device)
    return xp.eye(like.shape[0], dtype=like.dtype)  # a traced JAX array has no device


def scalar_like(like: Array, value: float) -> Array:
    """A number as an array without axes, of the kind, dtype and device of another."""
    if is_torch(like):
        return like.new_full((), value)
    return namespace(x=like).asarray(value, dtype=like.dtype)


def constant(x: Array) -> Array:
    """`x` without its gradient."""
    if is_torch(x):
        return x.detach()
    if is_jax(x):
        import jax  # noqa: PLC0415  # only ever reached with a JAX array in hand

        return jax.lax.stop_gradient(x)
    return x


def _and(arrays: dict[str, Array]) -> str:
    return " and ".join(arrays)
