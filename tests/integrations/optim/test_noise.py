"""Gradient noise: its variance, what it depends on, and bad arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from steelyard.errors import InputError, SpecError
from steelyard.integrations.optim import attach, gradient_noise
from tests.integrations.optim.transform_checks import (
    NUMBER,
    G,
    check_dtype_kept,
    check_matrix,
    check_not_contiguous,
    parameter,
    random_parameters,
    sparse,
    transformed,
)


def test_variance_zero_changes_nothing() -> None:
    check_matrix(gradient_noise(0.0), G)
    check_not_contiguous(gradient_noise(0.0), G)


@pytest.mark.parametrize("step", [0, 1, 7])
def test_noise_has_the_variance_of_the_formula(step: int) -> None:
    weights = Parameter(torch.zeros(200_000))
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attached = attach(optimizer, [gradient_noise(2.0, decay=0.7, seed=3)])
    for _ in range(step + 1):
        weights.grad = torch.full_like(weights, 5.0)
        optimizer.step()
    assert attached.step == step + 1
    noise = weights.grad.double() - 5.0  # type: ignore[union-attr]  # set above
    # 4 sigma of the mean and of the variance of 200,000 draws
    variance = 2.0 / (1 + step) ** 0.7
    assert abs(noise.mean()) < 4 * math.sqrt(variance / 200_000)
    assert noise.var().item() == pytest.approx(variance, rel=4 * math.sqrt(2 / 200_000))
    assert (noise**4).mean().item() == pytest.approx(3 * variance**2, rel=0.05)  # Gaussian


def test_noise_depends_on_the_seed_and_the_step_and_differs_between_parameters() -> None:
    def drawn(seed: int, steps: int) -> tuple[Tensor, Tensor]:
        pair = [parameter([0.0] * 64, [0.0] * 64) for _ in range(2)]
        optimizer = torch.optim.SGD(pair, lr=0.0)
        attach(optimizer, [gradient_noise(1.0, decay=0.0, seed=seed)])
        for _ in range(steps):
            for each in pair:
                each.grad = torch.zeros_like(each)
            optimizer.step()
        one, two = (each.grad for each in pair)
        assert one is not None
        assert two is not None
        return one, two

    first, second = drawn(5, 1)
    assert torch.equal(first, drawn(5, 1)[0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, drawn(6, 1)[0])
    assert not torch.equal(first, drawn(5, 2)[0])


def test_noise_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    transformed(gradient_noise(1.0), parameters=random_parameters(4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    check_dtype_kept(gradient_noise(1e-4), dtype)


def test_a_sparse_gradient_is_refused() -> None:
    one = sparse([0], [[1.0, 2.0]], [[1.0, 2.0]])
    message = (
        "gradient_noise must have dense gradients, since it changes every element, got a "
        "sparse one for parameter 0 of group 0, shape (1, 2): choose others with where="
    )
    with pytest.raises(InputError) as caught:
        transformed(gradient_noise(0.1), parameters=[one])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variance": -1}, NUMBER.format("variance of gradient_noise", ">= 0", -1)),
        (
            {"variance": 1.0, "decay": -1.0},
            "decay must be a finite number >= 0, got -1.0 (gradient_noise).",
        ),
        (
            {"variance": 1.0, "seed": -1},
            "seed must be a whole number >= 0, got -1 (gradient_noise).",
        ),
    ],
)
def test_bad_arguments_are_refused_when_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        gradient_noise(**options)
    assert str(caught.value) == message
