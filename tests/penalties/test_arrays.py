"""Operations that differ between NumPy, torch and JAX, and the checks of array arguments."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special  # type: ignore[import-untyped]  # SciPy has no types

from steelyard import penalties
from steelyard.errors import InputError, SteelyardError
from steelyard.penalties import _arrays

from .backends import JAX, NUMPY, TORCH, Backend
from .every_penalty import ONE, TWO, call


@pytest.mark.parametrize("fn", [*ONE, *TWO])
@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "complex64"])
def test_integer_arrays_are_an_error(backend: Backend, fn: Any, dtype: str) -> None:
    with pytest.raises(InputError, match=f"must hold floating-point numbers .* got {dtype}"):
        call(fn, backend.array([[1, 0]], dtype))


@pytest.mark.parametrize("fn", [*ONE, *TWO])
@pytest.mark.parametrize("thing", [1.0, [1.0], None, "x"])
def test_other_types_are_an_error(fn: Any, thing: Any) -> None:
    with pytest.raises(InputError, match="must be NumPy, torch or JAX arrays"):
        call(fn, thing)


def test_input_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="floating-point") as caught:
        penalties.l1(np.array([1]))
    assert isinstance(caught.value, SteelyardError)


@pytest.mark.parametrize("fn", TWO)
def test_shapes_must_match(backend: Backend, fn: Any) -> None:
    a, b = backend.array(np.zeros((2, 3))), backend.array(np.zeros((1, 3)))
    with pytest.raises(InputError, match=r"must have the same shape, got .: \(2, 3\), .: \(1, 3\)"):
        fn(a, b)


@pytest.mark.parametrize("fn", TWO)
def test_libraries_must_match(autodiff: Backend, fn: Any) -> None:
    a, b = autodiff.array([[0.0]]), np.array([[0.0]])
    with pytest.raises(InputError, match=r"all of one kind, got .: \w+, .: \w+; convert"):
        fn(a, b)


def test_checks_work_inside_jit() -> None:
    x = jax.numpy.ones((2, 2))
    with pytest.raises(InputError, match="reduction must be one of"):
        jax.jit(lambda x: penalties.l1(x, reduction="all"))(x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must have the same shape"):
        jax.jit(penalties.kl_divergence)(x, x[:1])


# Each operation.


def xp_of(x: Any) -> Any:
    return _arrays.namespace(x=x)


def gradient(backend: Backend, formula: Any, values: Any) -> Any:
    """Gradient of the sum of `formula(xp, x)`."""
    x = backend.array(values)
    [found] = backend.gradients(lambda x: formula(xp_of(x), x).sum(), x)
    return found


def test_kinds_of_arrays(backend: Backend) -> None:
    x = backend.array([1.0])
    checks = {"torch": _arrays.is_torch, "jax": _arrays.is_jax, "numpy": _arrays.is_numpy}
    assert {name for name, check in checks.items() if check(x)} == {backend.name}
    assert _arrays.is_array(x)
    for thing in (1.0, [1.0], None):
        assert not _arrays.is_array(thing)
        assert not _arrays.is_floating(thing)


@pytest.mark.parametrize(
    ("dtype", "floating", "widened"),
    [
        ("float16", True, "float32"),
        ("bfloat16", True, "float32"),
        ("float32", True, "float32"),
        ("float64", True, "float64"),
        ("int32", False, "int32"),
        ("bool", False, "bool"),
    ],
)
def test_dtypes(backend: Backend, dtype: str, floating: bool, widened: str) -> None:
    x = backend.array([1, 0], dtype)
    assert _arrays.dtype_name(x) == dtype
    assert _arrays.is_floating(x) is floating
    assert _arrays.dtype_name(_arrays.widen(xp_of(x), x)) == widened


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("bfloat16", "bfloat16"), "bfloat16"),
        (("bfloat16", "float16"), "float32"),
        (("bfloat16", "float32"), "float32"),
        (("float32", "float64", "float16"), "float64"),
    ],
)
def test_common_dtype(backend: Backend, dtypes: tuple[str, ...], expected: str) -> None:
    arrays = [backend.array([1.0], dtype) for dtype in dtypes]
    dtype = _arrays.common_dtype(xp_of(arrays[0]), arrays)
    assert dtype == backend.array([1.0], expected).dtype


def test_tracers_are_found_inside_jit() -> None:
    seen: list[bool] = []

    def record(x: Any) -> Any:
        seen.append(_arrays.is_jax_tracer(x))
        return x

    jax.jit(record)(JAX.array([1.0]))
    assert seen == [True]
    assert not any(_arrays.is_jax_tracer(each.array([1.0])) for each in (NUMPY, TORCH, JAX))


def test_absolute_has_gradient_zero_at_zero(autodiff: Backend) -> None:
    found = gradient(autodiff, _arrays.absolute, [-2.0, 0.0, 3.0])
    np.testing.assert_array_equal(found, [-1, 0, 1])


def test_clamp_has_the_full_gradient_on_its_limits(autodiff: Backend) -> None:
    x = [-2.0, -1.0, 0.5, 1.0, 2.0]
    both = gradient(autodiff, lambda xp, x: _arrays.clamp(xp, x, -1.0, 1.0), x)
    np.testing.assert_array_equal(both, [0, 1, 1, 1, 0])
    below = gradient(autodiff, lambda xp, x: _arrays.clamp(xp, x, -1.0), x)
    np.testing.assert_array_equal(below, [0, 1, 1, 1, 1])


def test_clamp_propagates_nan(backend: Backend) -> None:
    x = backend.array([math.nan, -math.inf, math.inf])
    clamped = backend.numpy(_arrays.clamp(xp_of(x), x, -1.0, 1.0))
    np.testing.assert_array_equal(clamped, [math.nan, -1, 1])


def test_root_has_gradient_zero_at_zero(autodiff: Backend) -> None:
    x = autodiff.array([0.0, 4.0, math.nan])
    np.testing.assert_array_equal(autodiff.numpy(_arrays.root(xp_of(x), x)), [0, 2, math.nan])
    np.testing.assert_array_equal(gradient(autodiff, _arrays.root, [0.0, 4.0]), [0, 0.25])


def test_floored_norm(autodiff: Backend) -> None:
    def norm(xp: Any, x: Any) -> Any:
        return _arrays.floored_norm(xp, x, -1, xp.full_like(x[:, :1], 0.5))

    x = autodiff.array([[3.0, 4.0], [0.1, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(autodiff.numpy(norm(xp_of(x), x)), [[5.0], [0.5], [0.5]])
    found = gradient(autodiff, norm, [[3.0, 4.0], [0.1, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.0, 0.0], [0.0, 0.0]], rtol=1e-12)


def test_log_softmax_of_scipy(backend: Backend) -> None:
    """SciPy 1.17 log_softmax; exp(1000) overflows."""
    values = np.array([[1.0, -2.0, 0.5], [1000.0, 999.0, -1000.0]])
    x = backend.array(values)
    for axis in (0, 1):
        np.testing.assert_allclose(
            backend.numpy(_arrays.log_softmax(xp_of(x), x, axis)),
            scipy.special.log_softmax(values, axis=axis),
            rtol=1e-12,
        )


def test_log_softmax_gradient(autodiff: Backend) -> None:
    """Of the first class: 1 - p there, -p elsewhere."""
    values = np.array([1.0, -2.0, 0.5])
    found = gradient(autodiff, lambda xp, x: _arrays.log_softmax(xp, x, 0)[:1], values)
    np.testing.assert_allclose(found, np.eye(3)[0] - scipy.special.softmax(values), rtol=1e-12)


def test_logaddexp(backend: Backend) -> None:
    """Warnings are errors here: NumPy warns of a NaN that propagates."""
    x, y = [0.0, -math.inf, -1e4, math.nan], [0.0, 1.0, -1e4, 0.0]
    a, b = backend.array(x), backend.array(y)
    expected = [math.log(2), 1.0, -1e4 + math.log(2), math.nan]
    np.testing.assert_allclose(
        backend.numpy(_arrays.logaddexp(xp_of(a), a, b)), expected, rtol=1e-12
    )


def test_gram_and_identity(backend: Backend) -> None:
    x = backend.array([[3.0, 4.0], [1.0, 0.0]], "float32")
    products = _arrays.gram_of_rows(xp_of(x), x)
    np.testing.assert_array_equal(backend.numpy(products), [[25, 3], [3, 1]])
    unit = _arrays.identity(xp_of(x), products)
    assert backend.dtype(unit) == "float32"
    np.testing.assert_array_equal(backend.numpy(unit), np.eye(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scalar_like(backend: Backend, dtype: str) -> None:
    scalar = _arrays.scalar_like(backend.array([1.0, 2.0], dtype), 2.5)
    assert backend.is_mine(scalar)
    assert (scalar.shape, backend.dtype(scalar), float(scalar)) == ((), dtype, 2.5)


def test_a_constant_has_no_gradient(autodiff: Backend) -> None:
    found = gradient(autodiff, lambda _, x: x * _arrays.constant(x), [2.0, -3.0])
    np.testing.assert_array_equal(found, [2, -3])


def test_accept_widens_and_names_the_dtype_of_the_result(backend: Backend) -> None:
    a, b = backend.array([1.0], "bfloat16"), backend.array([2.0], "float16")
    _, arrays, dtype = _arrays.accept(a=a, b=b)
    assert [backend.dtype(x) for x in arrays] == ["float32", "float32"]
    assert dtype == backend.array([1.0], "float32").dtype
