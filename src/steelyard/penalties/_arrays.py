"""Array operations that NumPy, torch and JAX spell or differentiate differently.

The formulas of the penalties are written once, against an array-API namespace `xp`; the cases in
which the three backends disagree are settled here.
"""

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
    """Check for a torch tensor without importing torch.

    array-api-compat's `is_torch_array` is wrapped in `lru_cache`, which Dynamo warns about, so
    its checks are only used on arrays that are not tensors.
    """
    return hasattr(type(x), "__torch_function__")


def is_sharded(x: object) -> bool:
    """Check for a `DTensor`, whose elements are spread over processes, without importing torch."""
    return is_torch(x) and hasattr(type(x), "device_mesh")


def is_jax(x: object) -> bool:
    return hasattr(x, "dtype") and not is_torch(x) and bool(is_jax_array(x))


def is_numpy(x: object) -> bool:
    return isinstance(x, _NUMPY)


def is_jax_tracer(x: object) -> bool:
    """Check whether `x` is a JAX tracer: an abstract array without values, as inside `jax.jit`."""
    if not is_jax(x):
        return False
    import jax  # noqa: PLC0415  # installed: `x` is a JAX array

    return isinstance(x, jax.core.Tracer)


def namespace(**arrays: Array) -> Namespace:
    """Array-API namespace that all the arrays share.

    Raises:
        InputError: one is not an array, or they come from different libraries.
    """
    if all(is_torch(x) for x in arrays.values()):
        import array_api_compat.torch as xp  # noqa: PLC0415  # torch is installed: all are tensors

        return xp
    # array_namespace ignores Python numbers, so they are rejected here by their missing dtype.
    if all(hasattr(x, "dtype") for x in arrays.values()):
        with contextlib.suppress(TypeError):
            return array_namespace(*arrays.values())
    kinds = ", ".join(f"{name}: {type(x).__qualname__}" for name, x in arrays.items())
    raise InputError(
        f"{_joined(arrays)} must be NumPy, torch or JAX arrays, all of one kind, got {kinds}; "
        "convert them first, for example with numpy.asarray or torch.as_tensor."
    )


def accept(**arrays: Array) -> tuple[Namespace, list[Array], Any]:
    """Check that the arrays are floating-point and share one shape.

    Returns:
        The namespace, the arrays with float16 and bfloat16 widened to float32 (in which sums
        are accumulated), and the dtype of the result.

    Raises:
        InputError: an array is not floating-point, or the shapes or libraries differ.
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
            f"{_joined(arrays)} must have the same shape, got {shapes}; broadcast them first."
        )
    return xp, [widen(xp, x) for x in given], common_dtype(xp, given)


def common_dtype(xp: Namespace, arrays: Sequence[Array]) -> Any:  # each backend's own class
    """Result dtype of mixed floats; written out since Dynamo cannot trace `torch.result_type`."""
    names = {dtype_name(x) for x in arrays}
    if len(names) == 1:
        return arrays[0].dtype
    return xp.float64 if "float64" in names else xp.float32


def dtype_name(x: Array) -> str:
    return str(x.dtype).rpartition(".")[2]


def is_array(x: object) -> bool:
    return is_torch(x) or is_jax(x) or is_numpy(x)


def is_floating(x: object) -> bool:
    """Check whether `x` is a floating-point array, which can have a gradient."""
    return is_array(x) and dtype_name(x) in _FLOATS


def widen(xp: Namespace, x: Array) -> Array:
    return xp.astype(x, xp.float32) if dtype_name(x) in _NARROW else x


def widened_dtype(xp: Namespace, x: Array) -> Any:  # each backend's own class
    """Dtype of `widen(xp, x)`."""
    return xp.float32 if dtype_name(x) in _NARROW else x.dtype


def cast(xp: Namespace, x: Array, dtype: Any) -> Array:  # dtype: each backend has its own class
    return xp.astype(x, dtype, copy=False)


def absolute(xp: Namespace, x: Array) -> Array:
    """Absolute value with the subgradient 0 at 0, where `jax.grad(jnp.abs)(0.)` is 1."""
    return xp.where(x == 0, 0.0, xp.abs(x)) if is_jax(x) else xp.abs(x)


def clamp(xp: Namespace, x: Array, low: float, high: float | None = None) -> Array:
    """Clamp `x`, with gradient 1 on the limits and 0 outside; NaN propagates.

    `jnp.clip` has gradient ½ on a limit, hence `where`. torch's `clamp` has gradient 1 there,
    propagates NaN, and is one kernel.
    """
    if is_torch(x):
        return x.clamp(low, high)
    x = xp.where(x < low, low, x)
    return x if high is None else xp.where(x > high, high, x)


def root(xp: Namespace, x: Array) -> Array:
    """Square root with gradient 0 at 0, where the derivative is infinite."""
    nonzero = x != 0  # not `> 0`: NaN has to propagate
    # The inner `where` keeps 0 away from sqrt: in the backward pass the outer one alone would
    # give 0 · (1 / (2√0)) = 0 · inf = NaN.
    return xp.where(nonzero, xp.sqrt(xp.where(nonzero, x, 1.0)), 0.0)


def floored_norm(xp: Namespace, x: Array, axis: int, floor: Array) -> Array:
    """`max(‖x‖₂, floor)` along `axis` (kept as size 1), with a finite gradient at 0.

    torch's fused norm has gradient 0 at 0; `jnp.linalg.norm` has NaN there, so the square is
    floored before the root: `√max(Σx², floor²)`.
    """
    if is_torch(x):
        norm = xp.linalg.vector_norm(x, axis=axis, keepdims=True)
        return xp.where(norm < floor, floor, norm)
    square, lowest = xp.sum(xp.square(x), axis=axis, keepdims=True), xp.square(floor)
    return xp.sqrt(xp.where(square < lowest, lowest, square))


def log_softmax(xp: Namespace, x: Array, axis: int) -> Array:
    """`x - log Σ exp(x)` along `axis`."""
    if is_torch(x):
        return x.log_softmax(axis)
    # log-softmax does not change under a shift. Subtracting the maximum keeps exp from
    # overflowing; as a constant it stays out of the gradient, where it would cancel.
    shifted = x - constant(xp.max(x, axis=axis, keepdims=True))
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))


def logaddexp(xp: Namespace, x: Array, y: Array) -> Array:
    """`log(exp(x) + exp(y))`, element by element."""
    if is_numpy(x):
        with np.errstate(invalid="ignore"):  # NumPy warns of a NaN that merely propagates
            return np.logaddexp(x, y)
    return xp.logaddexp(x, y)


def gram_of_rows(xp: Namespace, rows: Array) -> Array:
    """Gram matrix `rows @ rowsᵀ`, `[n, m]` to `[n, n]`, in the precision of the rows.

    Autocast (torch) and the default matmul precision of accelerators (JAX) would round
    the factors to bfloat16 or TF32.
    """
    if is_torch(rows):
        import torch  # noqa: PLC0415  # installed: a tensor was passed

        with torch.autocast(rows.device.type, enabled=False):
            return rows @ rows.mT
    if is_jax(rows):
        return xp.matmul(rows, xp.matrix_transpose(rows), precision="highest")
    return rows @ xp.matrix_transpose(rows)


def identity(xp: Namespace, like: Array) -> Array:
    """Identity matrix of the size, dtype and device of a square matrix."""
    if is_torch(like):
        import torch  # noqa: PLC0415  # installed: a tensor was passed

        return torch.eye(like.shape[0], dtype=like.dtype, device=like.device)
    return xp.eye(like.shape[0], dtype=like.dtype)  # JAX tracers have no device


def scalar_like(like: Array, value: float) -> Array:
    """0-dimensional array of `value`, of the library, dtype and device of `like`."""
    if is_torch(like):
        return like.new_full((), value)
    return namespace(x=like).asarray(value, dtype=like.dtype)


def constant(x: Array) -> Array:
    """Detach `x` from differentiation (`detach`, `stop_gradient`)."""
    if is_torch(x):
        return x.detach()
    if is_jax(x):
        import jax  # noqa: PLC0415  # installed: `x` is a JAX array

        return jax.lax.stop_gradient(x)
    return x


def _joined(arrays: dict[str, Array]) -> str:
    return " and ".join(arrays)
