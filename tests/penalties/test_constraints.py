"""Orthogonality and consistency: by hand, against other libraries, at singular points."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import InputError
from steelyard.penalties import consistency, kl_divergence, orthogonality

from .backends import Backend

X = np.random.default_rng(0).normal(size=(2, 3, 4))
M = [[3.0, 4.0], [1.0, 0.0]]  # unit rows (.6, .8), (1, 0); products 25, 3, 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.72),
        ({"normalize": False}, 18.0),
        ({"mode": "hard"}, 0.72),
        ({"mode": "hard", "normalize": False}, 18 + 24**2),
        ({"mode": "spectral"}, 0.6),
        ({"mode": "spectral", "normalize": False}, 12 + math.sqrt(153)),
        ({"axis": "sequence", "normalize": False}, 18.0),
        ({"axis": "vocabulary", "normalize": False}, 2 * 12.0**2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_orthogonality_by_hand(
    backend: Backend, options: dict[str, Any], expected: float, dtype: str
) -> None:
    value = orthogonality(backend.array(M, dtype), **options)
    assert backend.is_mine(value)
    assert backend.dtype(value) == dtype
    np.testing.assert_allclose(backend.numpy(value), expected, rtol=2e-6)


@pytest.mark.parametrize(
    ("axis", "matrix"),
    [
        ("rows", X.reshape(6, 4)),
        ("sequence", X.transpose(1, 0, 2).reshape(3, 8)),
        ("vocabulary", X.transpose(2, 0, 1).reshape(4, 6)),
    ],
)
@pytest.mark.parametrize("mode", ["soft", "hard", "spectral"])
def test_orthogonality_of_rank_3(backend: Backend, axis: Any, matrix: Any, mode: Any) -> None:
    """Against NumPy 2.4 written out."""
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    gap = unit @ unit.T - np.eye(len(unit))
    expected = np.linalg.norm(gap, 2) if mode == "spectral" else np.linalg.norm(gap) ** 2
    value = orthogonality(backend.array(X), axis=axis, mode=mode)
    np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-12)


def test_rows_of_any_rank(backend: Backend) -> None:
    deep = orthogonality(backend.array(X.reshape(1, 2, 3, 4)))
    np.testing.assert_allclose(
        backend.numpy(deep), backend.numpy(orthogonality(backend.array(X))), rtol=1e-12
    )


@pytest.mark.parametrize("mode", ["soft", "hard", "spectral"])
@pytest.mark.parametrize("normalize", [True, False])
def test_zero_rows_keep_finite_gradients(autodiff: Backend, mode: Any, normalize: bool) -> None:
    # Three rows alike: their eigenvalue 2 of G - I is above the 1 of the zero row.
    x = autodiff.array([[0.0, 0.0], [1.0, 1.0], [1.0, 0.9], [1.0, 0.8]], "float32")

    def penalty(x: Any) -> Any:
        return orthogonality(x, mode=mode, normalize=normalize)

    [gradient] = autodiff.gradients(penalty, x)
    assert np.all(np.isfinite(gradient))
    assert np.any(gradient[1:] != 0)
    [gradient] = autodiff.gradients(penalty, autodiff.array(np.zeros((2, 2)), "float32"))
    assert np.all(np.isfinite(gradient))


def test_spectral_gradient_with_equal_eigenvalues(autodiff: Backend) -> None:
    """At the optimum all eigenvalues of G - I are 0, and so are their differences."""
    for rows in (np.eye(3), 2 * np.eye(3)):
        [gradient] = autodiff.gradients(
            lambda x: orthogonality(x, mode="spectral", normalize=False),
            autodiff.array(rows, "float32"),
        )
        assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("size", [1e25, 1e-6])
def test_large_and_small_rows_are_normalised(backend: Backend, size: float) -> None:
    """1e25² overflows float32."""
    value = orthogonality(backend.array(np.multiply(M, size), "float32"))
    np.testing.assert_allclose(backend.numpy(value), 0.72, rtol=1e-5)


def test_rows_below_the_norm_floor_are_divided_by_the_floor(backend: Backend) -> None:
    x = backend.array([[1e-10, 0.0], [1e-10, 0.0]])
    np.testing.assert_allclose(backend.numpy(orthogonality(x)), 2 * 1e-8, rtol=1e-9)


@pytest.mark.parametrize(
    ("shape", "axis", "message"),
    [
        ((3,), "rows", r"x must have rank at least 2 for axis='rows', got shape \(3,\)"),
        ((3,), "sequence", r"x must have rank 2 or 3 for axis='sequence', got shape \(3,\)"),
        ((1, 2, 3, 4), "vocabulary", r"rank 2 or 3 for axis='vocabulary', got shape \(1, 2, 3, 4"),
        ((0, 3), "rows", r"x must not be empty, got shape \(0, 3\)"),
    ],
)
def test_orthogonality_of_a_wrong_rank_is_an_error(
    backend: Backend, shape: tuple[int, ...], axis: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        orthogonality(backend.array(np.ones(shape)), axis=axis)


@pytest.mark.parametrize(
    ("metric", "options", "expected"),
    [
        ("mse", {}, 12.5 / 4),
        ("mse", {"reduction": "none"}, [[4, 4], [0.25, 4.25]]),
        ("l1", {"reduction": "sum"}, 2 + 2 + 0.5 + math.sqrt(4.25)),
        ("cosine", {"reduction": "none"}, [1 - 11 / (5 * math.sqrt(5)), 1.0]),
        ("cosine", {}, (2 - 11 / (5 * math.sqrt(5))) / 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_consistency_by_hand(
    backend: Backend, metric: Any, options: dict[str, Any], expected: Any, dtype: str
) -> None:
    a = backend.array([[3.0, 4.0], [0.0, 0.0]], dtype)
    b = backend.array([[1.0, 2.0], [0.5, math.sqrt(4.25)]], dtype)
    value = consistency(a, b, metric=metric, **options)
    assert backend.dtype(value) == dtype
    np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-6)


def test_consistency_agrees_with_torch(backend: Backend) -> None:
    """torch 2.13 mse_loss, l1_loss and cosine_similarity."""
    a, b = X, X[::-1] + 1.0
    torch_a, torch_b = torch.as_tensor(a), torch.as_tensor(b.copy())
    functional = torch.nn.functional
    for metric, expected in [
        ("mse", functional.mse_loss(torch_a, torch_b)),
        ("l1", functional.l1_loss(torch_a, torch_b)),
        ("cosine", (1 - functional.cosine_similarity(torch_a, torch_b, dim=1)).mean()),
    ]:
        value = consistency(backend.array(a), backend.array(b), metric=metric, axis=1)  # type: ignore[arg-type]
        np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-12)


def test_kl_metric_is_symmetric_kl(backend: Backend) -> None:
    a = backend.array(np.log([[0.5, 0.5], [0.1, 0.9]]))
    b = backend.array(np.log([[0.2, 0.8], [0.3, 0.7]]))
    for mask in (None, backend.mask([True, False])):
        np.testing.assert_allclose(
            backend.numpy(consistency(a, b, metric="kl", mask=mask)),
            backend.numpy(kl_divergence(a, b, direction="symmetric", mask=mask)),
            rtol=1e-14,
        )


def test_cosine_of_zero_vectors(autodiff: Backend) -> None:
    a = autodiff.array([[0.0, 0.0], [0.0, 0.0]], "float32")
    b = autodiff.array([[1.0, 2.0], [0.0, 0.0]], "float32")
    assert autodiff.numpy(consistency(a, b, metric="cosine")) == 1.0
    for gradient in autodiff.gradients(lambda a, b: consistency(a, b, metric="cosine"), a, b):
        assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("size", [1e30, 1e-6])
def test_cosine_of_large_and_small_vectors(autodiff: Backend, size: float) -> None:
    a = autodiff.array([[3 * size, 4 * size]], "float32")
    b = autodiff.array([[1.0, 2.0]], "float32")
    value = consistency(a, b, metric="cosine")
    np.testing.assert_allclose(autodiff.numpy(value), 1 - 11 / (5 * math.sqrt(5)), rtol=1e-4)
    of_a, of_b = autodiff.gradients(lambda a, b: consistency(a, b, metric="cosine"), a, b)
    # d(1 - cos)/da = (cos · â - b̂)/‖a‖, and scales with 1/size
    cosine = 11 / (5 * math.sqrt(5))
    hat_a, hat_b = np.array([0.6, 0.8]), np.array([1, 2]) / math.sqrt(5)
    np.testing.assert_allclose(of_a * size, [(cosine * hat_a - hat_b) / 5], rtol=1e-3)
    np.testing.assert_allclose(of_b, [(cosine * hat_b - hat_a) / math.sqrt(5)], rtol=1e-3)


def test_l1_metric_has_no_gradient_where_equal(autodiff: Backend) -> None:
    a, b = autodiff.array([1.0, 2.0], "float32"), autodiff.array([1.0, 0.0], "float32")
    of_a, of_b = autodiff.gradients(lambda a, b: consistency(a, b, metric="l1"), a, b)
    np.testing.assert_array_equal(of_a, [0, 0.5])
    np.testing.assert_array_equal(of_b, [0, -0.5])


@pytest.mark.parametrize("metric", ["mse", "l1", "cosine", "kl"])
def test_a_masked_nan_has_no_effect(autodiff: Backend, metric: Any) -> None:
    a = autodiff.array([[-1.0, -0.5], [np.nan, np.inf]], "float32")
    b = autodiff.array([[-0.2, -3.0], [np.nan, -1.0]], "float32")
    keep = [True, False] if metric in ("cosine", "kl") else [[True], [False]]

    def penalty(a: Any, b: Any) -> Any:
        return consistency(a, b, metric=metric, mask=autodiff.mask(keep))

    np.testing.assert_allclose(
        autodiff.numpy(penalty(a, b)),
        autodiff.numpy(consistency(a[:1], b[:1], metric=metric)),
        rtol=1e-6,
    )
    for gradient in autodiff.gradients(penalty, a, b):
        assert np.all(np.isfinite(gradient))
        assert np.all(gradient[0] != 0)
        np.testing.assert_array_equal(gradient[1], 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(backend: Backend, dtype: str) -> None:
    x = backend.array(np.random.default_rng(0).normal(size=(3, 2000)), dtype)
    exact = backend.numpy(x)
    value = orthogonality(x)
    assert backend.dtype(value) == dtype
    np.testing.assert_allclose(backend.numpy(value), orthogonality(exact), rtol=2**-7)
    value = consistency(x, x * 2, metric="mse")
    assert backend.dtype(value) == dtype
    np.testing.assert_allclose(backend.numpy(value), np.mean(exact**2), rtol=2**-7)


def test_autocast_does_not_round_the_products() -> None:
    x = torch.as_tensor(X[0], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = orthogonality(x)
    assert inside == orthogonality(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: orthogonality(x, mode="firm"), "mode must be one of 'soft', 'hard', 'spectral'"),  # type: ignore[arg-type]
        (lambda x: orthogonality(x, axis="cols"), "axis must be one of 'rows', 'sequence'"),  # type: ignore[arg-type]
        (lambda x: orthogonality(x, axis=0), "axis must be one of 'rows', 'sequence', 'vocab"),  # type: ignore[arg-type]
        (lambda x: orthogonality(x, normalize=None), "normalize must be True or False, got None"),  # type: ignore[arg-type]
        (lambda x: consistency(x, x, metric="mae"), "metric must be one of 'mse', 'l1', 'cosine'"),  # type: ignore[arg-type]
        (lambda x: consistency(x, x, metric="kl", axis=5), "axis must be an integer in [-2, 1]"),
    ],
)
def test_invalid_options(backend: Backend, call: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        call(backend.array(M))
    assert str(caught.value).startswith(message)
