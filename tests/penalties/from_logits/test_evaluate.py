"""Evaluation of components on every kind of array: the same numbers, whichever path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits._components import CROSS_ENTROPY, ENTROPY, Component
from steelyard.penalties.from_logits._evaluate import evaluate, value_rows, weighted_sum
from steelyard.penalties.from_logits._projection_inputs import accept
from tests.penalties.backends import Backend
from tests.penalties.from_logits.cases import arguments, by_autograd, inputs

COMPONENTS = [Component(ENTROPY, 1.0), Component(CROSS_ENTROPY, 1.0)]
WEIGHTS = [-0.5, 2.0]  # the entropy of the cases is a bonus: it has the other sign


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_total_values_gradient_and_products(backend: Backend, reduction: str) -> None:
    tensors = inputs(55, 4, 6)
    scale = torch.full((4,), 0.25 if reduction == "mean" else 1.0, dtype=torch.float64)
    values, gradients = by_autograd(["entropy", "cross_entropy"], *tensors, scale)
    z, _, t = arguments(backend, *tensors)
    rows: Any = accept(z, targets=t)
    total, own, gradient, products = evaluate(rows, COMPONENTS, WEIGHTS, reduction, tracks=True)
    wanted = np.array([-float(values["entropy"]), float(values["cross_entropy"])])
    np.testing.assert_allclose(backend.numpy(own), wanted, rtol=1e-12)
    np.testing.assert_allclose(backend.numpy(total), wanted @ WEIGHTS, rtol=1e-12)
    np.testing.assert_allclose(
        backend.numpy(weighted_sum(rows, list(zip(COMPONENTS, WEIGHTS, strict=True)), reduction)),
        wanted @ WEIGHTS,
        rtol=1e-12,
    )
    each = torch.stack([-gradients["entropy"][0], gradients["cross_entropy"][0]])
    exact = torch.einsum("c,cij->ij", torch.tensor(WEIGHTS, dtype=torch.float64), each)
    np.testing.assert_allclose(backend.numpy(gradient), exact.numpy(), rtol=1e-9, atol=1e-14)
    gram = torch.einsum("aij,bij->ab", each, each)
    np.testing.assert_allclose(backend.numpy(products), gram.numpy(), rtol=1e-9)


def test_values_by_row_are_masked() -> None:
    rows: Any = accept(np.zeros((3, 4)), mask=np.array([True, False, True]))
    found = value_rows(rows, COMPONENTS[:1])
    np.testing.assert_allclose(found, [[np.log(4), 0.0, np.log(4)]])


def test_without_tracking_there_are_no_products() -> None:
    for x in (np.zeros((2, 3)), torch.zeros(2, 3)):
        *_, gradient, products = evaluate(accept(x), COMPONENTS[:1], [1.0], "mean")
        assert gradient is None
        assert products is None


def test_a_projection_has_no_gradient_by_logits() -> None:
    projection = Projection(torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3))
    total, _, gradient, products = evaluate(
        accept(projection), COMPONENTS[:1], [1.0], "mean", tracks=True
    )
    assert gradient is None
    assert products is not None
    assert total.requires_grad
    torch.testing.assert_close(total.detach(), torch.tensor(4.0).log())
