"""Gradient penalties and output magnitude: by hand, and at singular points."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from steelyard.errors import InputError
from steelyard.penalties import (
    gradient_penalty,
    interpolated_gradient_penalty,
    output_magnitude_penalty,
)

from .backends import JAX, NUMPY, TORCH, Backend

X = [[3.0, 4.0], [0.0, 1.0]]


# Aliases without types, for calls that are wrong on purpose.
untyped_gradient_penalty: Any = gradient_penalty
untyped_magnitude_penalty: Any = output_magnitude_penalty


def half_square(x: Any) -> Any:
    """Its gradient is x."""
    return 0.5 * (x * x).sum(-1)


def total_half_square(x: Any) -> Any:
    return half_square(x).sum()


def column(x: Any) -> Any:
    return half_square(x)[:, None]


def generator_of(backend: Backend, seed: int) -> Any:
    if backend.name == "torch":
        return torch.Generator(backend.device).manual_seed(seed)
    return jax.random.key(seed)


@pytest.mark.parametrize("f", [half_square, total_half_square, column])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_gradient_penalty_by_hand(autodiff: Backend, f: Any, dtype: str) -> None:
    x = autodiff.array(X, dtype)
    whole = gradient_penalty(f, x, target_norm=2.0)
    assert autodiff.dtype(whole) == dtype
    np.testing.assert_allclose(autodiff.numpy(whole), (np.sqrt(26) - 2) ** 2, rtol=4e-3)
    each = gradient_penalty(f, x, per_sample=True)
    assert autodiff.numpy(each) == (4**2 + 0) / 2
    assert each.shape == ()


def test_rank_1_and_0(autodiff: Backend) -> None:
    line = autodiff.array([3.0, -4.0])
    each = gradient_penalty(lambda x: 0.5 * x * x, line, per_sample=True)
    assert autodiff.numpy(each) == (2**2 + 3**2) / 2
    assert autodiff.numpy(gradient_penalty(lambda x: x * x, autodiff.array(3.0))) == 25


def test_parameters_of_f_are_differentiated(autodiff: Backend) -> None:
    x = autodiff.array(X)

    def penalty(weight: Any) -> Any:
        return gradient_penalty(lambda x: x @ weight, x, per_sample=True)

    # ∇ₓ = weight for each sample: d(‖w‖ - 1)²/dw = 2(‖w‖ - 1) w/‖w‖
    [gradient] = autodiff.gradients(penalty, autodiff.array([3.0, 4.0]))
    np.testing.assert_allclose(gradient, [8 * 0.6, 8 * 0.8], rtol=1e-12)


def test_x_is_differentiated(autodiff: Backend) -> None:
    [gradient] = autodiff.gradients(lambda x: gradient_penalty(half_square, x), autodiff.array(X))
    np.testing.assert_allclose(gradient, 2 * (1 - 1 / np.sqrt(26)) * np.array(X), rtol=1e-12)


@pytest.mark.parametrize("per_sample", [True, False])
def test_zero_gradient_keeps_a_finite_second_derivative(
    autodiff: Backend, per_sample: bool
) -> None:
    x = autodiff.array([[0.0, 0.0], [0.0, 0.0]], "float32")
    [gradient] = autodiff.gradients(
        lambda x: gradient_penalty(half_square, x, per_sample=per_sample), x
    )
    np.testing.assert_array_equal(gradient, 0)


def test_torch_under_no_grad() -> None:
    x = torch.as_tensor(X)
    with torch.no_grad():
        value = gradient_penalty(half_square, x, per_sample=True)
    assert value == 8
    assert not value.requires_grad
    assert not x.requires_grad


def test_interpolation_is_reproducible(autodiff: Backend) -> None:
    x, reference = autodiff.array(X), autodiff.array(np.zeros((2, 2)))

    def penalty(seed: int, **options: Any) -> float:
        generator = generator_of(autodiff, seed)
        value = interpolated_gradient_penalty(
            half_square, x, reference, generator=generator, **options
        )
        return float(autodiff.numpy(value))

    assert penalty(0) == penalty(0)
    assert penalty(0) != penalty(1)
    assert penalty(0, per_sample=False) == penalty(0, per_sample=False)


@pytest.mark.parametrize("per_sample", [True, False])
def test_interpolated_points_lie_between_x_and_the_reference(
    autodiff: Backend, per_sample: bool
) -> None:
    seen: list[Any] = []

    def watch(x: Any) -> Any:
        seen.append(x)
        return half_square(x)

    rows = 50
    x, reference = autodiff.array(np.ones((rows, 3))), autodiff.array(np.full((rows, 3), -1.0))
    if autodiff == JAX:
        # The point that f sees is traced; what it is shows in the penalty of a target of 0.
        value = interpolated_gradient_penalty(
            half_square,
            x,
            reference,
            target_norm=0.0,
            per_sample=per_sample,
            generator=jax.random.key(0),
        )
        # ‖point‖² = 3(2ε - 1)²: its mean over samples is 1, that of the whole 150(2ε - 1)²
        share = jax.random.uniform(
            jax.random.key(0), (rows, 1) if per_sample else (), jax.numpy.float64
        )
        expected = np.mean(3 * (2 * np.asarray(share) - 1) ** 2) * (1 if per_sample else rows)
        np.testing.assert_allclose(autodiff.numpy(value), expected, rtol=1e-12)
        return
    interpolated_gradient_penalty(
        watch,
        x,
        reference,
        per_sample=per_sample,
        generator=torch.Generator(autodiff.device).manual_seed(0),
    )
    points = autodiff.numpy(seen[0])
    assert np.all((points >= -1) & (points < 1))
    np.testing.assert_array_equal(points, points[:, :1].repeat(3, 1))  # one ε for a sample
    assert len(np.unique(points)) == (rows if per_sample else 1)


def test_torch_draws_from_the_default_generator() -> None:
    x, reference = torch.as_tensor(X), torch.zeros(2, 2)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = interpolated_gradient_penalty(half_square, x, reference)
        torch.manual_seed(3)
        assert interpolated_gradient_penalty(half_square, x, reference) == first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interpolation_keeps_the_dtype(autodiff: Backend, dtype: str) -> None:
    x = autodiff.array(X, dtype)
    value = interpolated_gradient_penalty(
        lambda x: 2 * x[:, 0], x, x, generator=generator_of(autodiff, 0)
    )
    assert autodiff.dtype(value) == dtype
    assert autodiff.numpy(value) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (np.sqrt(6.5) - 1) ** 2),
        ({"target": 0.5}, (np.sqrt(6.5) - 0.5) ** 2),
        ({"reduction": "sum", "target": 2}, (np.sqrt(26) - 2) ** 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_output_magnitude_by_hand(
    backend: Backend, options: dict[str, Any], expected: float, dtype: str
) -> None:
    value = output_magnitude_penalty(backend.array(X, dtype), **options)
    assert backend.dtype(value) == dtype
    rtol = 1e-6 if dtype in ("float32", "float64") else 2**-8
    np.testing.assert_allclose(backend.numpy(value), expected, rtol=rtol)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_output_magnitude_at_zero(autodiff: Backend, reduction: Any) -> None:
    def penalty(x: Any) -> Any:
        return output_magnitude_penalty(x, reduction=reduction)

    for size in (0.0, 1e-30):  # 1e-30² vanishes in float32
        x = autodiff.array([size, -size], "float32")
        assert autodiff.numpy(penalty(x)) == 1
        [gradient] = autodiff.gradients(penalty, x)
        assert np.all(np.isfinite(gradient))
    assert np.isnan(autodiff.numpy(penalty(autodiff.array([np.nan]))))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: untyped_gradient_penalty(half_square, x, target_norm=np.inf),
            "target_norm must be a f",
        ),
        (
            lambda x: untyped_gradient_penalty(half_square, x, per_sample=0),
            "per_sample must be True or Fa",
        ),
        (
            lambda x: untyped_gradient_penalty(lambda z: z, x),
            "f must return a scalar or one value per sample (2), got shape (2, 2)",
        ),
        (
            lambda x: untyped_gradient_penalty(lambda z: z[:1, 0], x),
            "f must return a scalar or one value per sample (2), got shape (1,)",
        ),
        (lambda x: untyped_gradient_penalty(lambda _: 1.0, x), "f must return an array, got float"),
        (
            lambda x: untyped_gradient_penalty(half_square, x[0, 0], per_sample=True),
            "x must have a sample axis for per_sample=True, got shape ()",
        ),
        (
            lambda x: interpolated_gradient_penalty(half_square, x, x[:1]),
            "x and reference must have the same shape, got x: (2, 2), reference: (1, 2)",
        ),
        (
            lambda x: interpolated_gradient_penalty(half_square, x, x, generator=0),
            "generator must be ",
        ),
        (
            lambda x: untyped_magnitude_penalty(x, reduction="none"),
            "reduction must be one of 'mean', 'sum', got 'none'",
        ),
        (lambda x: untyped_magnitude_penalty(x, target=None), "target must be a finite number, go"),
    ],
)
def test_invalid_calls(autodiff: Backend, call: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        call(autodiff.array(X))
    assert str(caught.value).startswith(message)


def test_jax_needs_a_key() -> None:
    x = JAX.array(X)
    with pytest.raises(InputError, match=r"must be a JAX key, got NoneType; .*jax.random.key"):
        interpolated_gradient_penalty(half_square, x, x)


@pytest.mark.parametrize(
    "f", [lambda x: (x.detach() ** 2).sum(), lambda x: torch.ones(2, requires_grad=True).sum()]
)
def test_torch_f_without_a_path_to_x(f: Any) -> None:
    with pytest.raises(InputError, match="must be differentiable with respect to x"):
        gradient_penalty(f, TORCH.array(X))


def test_numpy_arrays_are_an_error() -> None:
    x = NUMPY.array(X)
    with pytest.raises(InputError, match="x must be a torch or JAX array, got ndarray"):
        gradient_penalty(half_square, x)
    with pytest.raises(InputError, match="x must be a torch or JAX array, got ndarray"):
        interpolated_gradient_penalty(half_square, x, x)
