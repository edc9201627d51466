"""`l1`, `l2` and `elastic_net`: by hand, against other libraries, at singular points."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from sklearn.linear_model import ElasticNet  # type: ignore[import-untyped]  # it has no types

from steelyard.errors import InputError
from steelyard.penalties import elastic_net, l1, l2

from .backends import JAX, TORCH, Backend

X = [[1.0, -2.0, 0.0], [3.0, -0.5, 0.25]]


@pytest.mark.parametrize(
    ("fn", "options", "expected"),
    [
        (l1, {}, 6.75),
        (l1, {"reduction": "mean"}, 1.125),
        (l1, {"scale": 2.0}, 13.5),
        (l1, {"reduction": "none"}, [[1, 2, 0], [3, 0.5, 0.25]]),
        (l2, {}, 14.3125),
        (l2, {"reduction": "mean", "scale": 6.0}, 14.3125),
        (l2, {"clip": 1.0}, 3.3125),
        (l2, {"center": 1.0}, 16.8125),
        (l2, {"center": 1, "clip": 2.0}, 11.8125),
        (l2, {"center": "mean", "reduction": "mean"}, 14.3125 / 6 - (1.75 / 6) ** 2),
        (l2, {"reduction": "none", "clip": 2.0}, [[1, 4, 0], [4, 0.25, 0.0625]]),
        (elastic_net, {}, 0.5 * 6.75 + 0.5 * 14.3125),
        (elastic_net, {"l1_ratio": 1.0}, 6.75),
        (elastic_net, {"l1_ratio": 0}, 14.3125),
        (elastic_net, {"l1_ratio": 0.25, "reduction": "mean", "scale": 6}, 12.421875),
        (elastic_net, {"reduction": "none"}, [[1, 3, 0], [6, 0.375, 0.15625]]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_value_by_hand(
    backend: Backend, fn: Any, options: dict[str, Any], expected: Any, dtype: str
) -> None:
    x = backend.array(X, dtype)
    value = fn(x, **options)
    assert backend.is_mine(value)
    assert backend.dtype(value) == dtype
    np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-6)


def test_elastic_net_is_the_penalty_of_scikit_learn() -> None:
    """scikit-learn 1.9: alpha·r·‖w‖₁ + ½·alpha·(1-r)·‖w‖²; ours without the ½."""
    rng = np.random.default_rng(0)
    features, target = rng.normal(size=(50, 4)), rng.normal(size=50)
    alpha, ratio = 0.1, 0.3
    model = ElasticNet(alpha=alpha, l1_ratio=ratio, fit_intercept=False, tol=1e-12)
    best = model.fit(features, target).coef_
    scale = alpha * (ratio + (1 - ratio) / 2)

    def objective(w: Any) -> float:
        residual = target - features @ w
        penalty = elastic_net(w, scale=scale, l1_ratio=alpha * ratio / scale)
        return float(residual @ residual / (2 * len(target)) + penalty)

    # scikit-learn's optimum is an optimum of our objective only if the two are the same.
    here = objective(best)
    for step in (1e-3, -1e-3):
        for i in range(4):
            moved = best.copy()
            moved[i] += step
            assert objective(moved) > here
    dual_gap_of_scikit_learn = 1e-10
    np.testing.assert_allclose(
        here,
        np.sum((target - features @ best) ** 2) / 100
        + alpha * ratio * np.abs(best).sum()
        + 0.5 * alpha * (1 - ratio) * np.sum(best**2),
        atol=dual_gap_of_scikit_learn,
    )


def test_norms_agree_with_torch() -> None:
    """torch 2.13 vector norms."""
    x = torch.as_tensor(X)
    torch.testing.assert_close(l1(x), torch.linalg.vector_norm(x, 1))
    torch.testing.assert_close(l2(x), torch.linalg.vector_norm(x, 2) ** 2)


def test_the_gradient_of_l1_at_zero_is_zero(autodiff: Backend) -> None:
    assert jax.grad(jax.numpy.abs)(0.0) == 1.0, "JAX changed: `absolute` may be simplified"
    [gradient] = autodiff.gradients(l1, autodiff.array([0.0, -0.0, 2.0, -3.0], "float32"))
    np.testing.assert_array_equal(gradient, [0, 0, 1, -1])
    [gradient] = autodiff.gradients(elastic_net, autodiff.array([0.0, 1.0], "float32"))
    np.testing.assert_array_equal(gradient, [0, 1.5])


def test_the_gradient_of_a_clipped_l2(autodiff: Backend) -> None:
    x = autodiff.array([-3.0, -1.0, 0.5, 1.0, 3.0], "float32")
    [gradient] = autodiff.gradients(lambda x: l2(x, clip=1.0), x)
    np.testing.assert_array_equal(gradient, [0, -2, 1, 2, 0])


def test_centre_is_differentiated(autodiff: Backend) -> None:
    x = autodiff.array([1.0, 2.0, 6.0])
    [gradient] = autodiff.gradients(lambda x: l2(x, center="mean", clip=2.5), x)
    # centred -2, -1, 3 (clipped): the mean passes on -(-4 - 2)/3 = 2 to every element
    np.testing.assert_allclose(gradient, [-4 + 2, -2 + 2, 0 + 2], rtol=1e-12)


@pytest.mark.parametrize("fn", [l1, l2, elastic_net])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_propagate_unless_masked(backend: Backend, fn: Any, bad: float) -> None:
    x = backend.array([1.0, bad], "float32")
    assert not np.isfinite(backend.numpy(fn(x)))
    kept = backend.mask([True, False])
    assert backend.numpy(fn(x, mask=kept, reduction="mean")) == 1.0
    np.testing.assert_array_equal(backend.numpy(fn(x, mask=kept, reduction="none")), [1, 0])


@pytest.mark.parametrize("fn", [l1, l2, elastic_net])
def test_a_masked_nan_has_no_gradient(autodiff: Backend, fn: Any) -> None:
    x = autodiff.array([[1.0, np.nan], [-1.0, np.inf]], "float32")
    mask = autodiff.mask([True, False])
    [gradient] = autodiff.gradients(lambda x: fn(x, mask=mask, reduction="mean"), x)
    assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(gradient[:, 1], 0)
    assert np.all(gradient[:, 0] != 0)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"center": "mean"}])
def test_an_all_false_mask_gives_zero(
    backend: Backend, reduction: Any, options: dict[str, Any]
) -> None:
    x = backend.array([1.0, np.nan], "float32")
    all_false = backend.mask([False, False])
    assert backend.numpy(l2(x, mask=all_false, reduction=reduction, **options)) == 0.0
    assert backend.numpy(l2(x[:0], reduction=reduction)) == 0.0
    if backend in (TORCH, JAX):
        [gradient] = backend.gradients(
            lambda x: l2(x, mask=all_false, reduction=reduction, **options), x
        )
        np.testing.assert_array_equal(gradient, [0, 0])


def test_masked_elements_do_not_move_the_mean(backend: Backend) -> None:
    x = backend.array([1.0, 3.0, 100.0])
    mask = backend.mask([True, True, False])
    assert backend.numpy(l2(x, center="mean", mask=mask)) == 2.0


def test_l1_ratio_one_ignores_squares_that_overflow(backend: Backend) -> None:
    x = backend.array([1e30], "float32")
    np.testing.assert_allclose(backend.numpy(elastic_net(x, l1_ratio=1.0)), 1e30, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_accumulates_in_float32(backend: Backend, dtype: str) -> None:
    """Summed in bfloat16, 4096 ones stop at 256; in float16, 1e-3 · 4096 is off by per cents."""
    x = backend.array(np.ones(4096), dtype)
    value = l1(x)
    assert backend.dtype(value) == dtype
    assert backend.numpy(value) == 4096
    # 300² overflows float16; its mean of one in 4096 does not.
    spike = backend.array([300.0] + [0.0] * 4095, dtype)
    np.testing.assert_allclose(backend.numpy(l2(spike, reduction="mean")), 21.97, rtol=4e-3)


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (l1, {"reduction": "avg"}, "reduction must be one of 'sum', 'mean', 'none', got 'avg'"),
        (l1, {"reduction": None}, "reduction must be one of 'sum', 'mean', 'none', got None"),
        (l1, {"scale": float("nan")}, "scale must be a finite number, got nan"),
        (l1, {"scale": True}, "scale must be a finite number, got True"),
        (l1, {"scale": "2"}, "scale must be a finite number, got '2'"),
        (l2, {"clip": 0.0}, "clip must be None or a finite number > 0, got 0.0"),
        (l2, {"clip": float("inf")}, "clip must be None or a finite number > 0, got inf"),
        (l2, {"center": "median"}, "center must be one of 'mean', got 'median'"),
        (l2, {"center": [1.0]}, "center must be None, 'mean' or a finite number, got [1.0]"),
        (elastic_net, {"l1_ratio": 1.5}, "l1_ratio must be a number in [0, 1], got 1.5"),
        (elastic_net, {"l1_ratio": -0.1}, "l1_ratio must be a number in [0, 1], got -0.1"),
    ],
)
def test_invalid_options(backend: Backend, fn: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        fn(backend.array([1.0]), **options)
    assert str(caught.value).startswith(message)


def test_options_may_be_numpy_numbers() -> None:
    two: Any
    for two in (np.float32(2.0), np.int64(2), 2):
        assert l1(np.array([1.0]), scale=two) == 2.0
