"""Evaluation of components on every kind of array: the same numbers, whichever path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import GradientError
from steelyard.penalties import entropy, from_logits
from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits._components import CROSS_ENTROPY, ENTROPY, Component
from steelyard.penalties.from_logits._evaluate import evaluate, value_rows, weighted_total
from steelyard.penalties.from_logits.projection import accept
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
        backend.numpy(weighted_total(rows, list(zip(COMPONENTS, WEIGHTS, strict=True)), reduction)),
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


# Inside of torch.func transforms.

TARGETS = torch.tensor([1, 3, 0])
LOGITS, REFERENCE = torch.randn(
    2, 3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64
)
FUNCTIONS: dict[str, Any] = {
    "entropy": from_logits.entropy,
    "kl": lambda z, **o: from_logits.kl(z, REFERENCE[: len(z)], **o),
    "js": lambda z, **o: from_logits.js(z, REFERENCE[: len(z)], **o),
    "z_loss": from_logits.z_loss,
    "cross_entropy": lambda z, **o: from_logits.cross_entropy(z, TARGETS[: len(z)], **o),
}


def outside(fn: Any, logits: torch.Tensor) -> torch.Tensor:
    """Gradient by `backward`, outside of transforms."""
    leaf = logits.clone().requires_grad_()
    fn(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_grad_is_that_of_backward(name: str, reduction: str) -> None:
    mask = torch.tensor([True, False, True])

    def loss(z: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = FUNCTIONS[name](z, mask=mask, reduction=reduction)
        return value.sum()

    found = torch.func.grad(loss)(LOGITS)
    torch.testing.assert_close(found, outside(loss, LOGITS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_of_grad_is_the_gradient_of_each(name: str) -> None:
    batch = torch.stack([LOGITS, 2 * LOGITS.flip(0)])
    found = torch.func.vmap(torch.func.grad(FUNCTIONS[name]))(batch)
    for mine, logits in zip(found, batch, strict=True):
        torch.testing.assert_close(mine, outside(FUNCTIONS[name], logits), rtol=1e-12, atol=1e-12)


def test_a_hessian_is_that_of_the_log_probabilities() -> None:
    found, wanted = (
        torch.func.jacrev(torch.func.grad(fn))(LOGITS)
        for fn in (from_logits.entropy, lambda z: entropy(z.log_softmax(-1)))
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_composed_logits_in_a_transform() -> None:
    def total(z: torch.Tensor) -> Any:
        return from_logits.compose_logits(
            z, {"entropy": 0.5, "cross_entropy": 1.0}, targets=TARGETS
        ).total

    torch.testing.assert_close(torch.func.grad(total)(LOGITS), outside(total, LOGITS))


def test_what_a_transform_refuses() -> None:
    def tracked(z: torch.Tensor) -> Any:
        return from_logits.compose_logits(z, ["entropy"], track_grad_norms=True).total

    with pytest.raises(GradientError) as caught:
        torch.func.grad(tracked)(LOGITS)
    assert str(caught.value) == (
        "inside of torch.func transforms such as grad and vmap norms cannot be tracked, got "
        "track_grad_norms=True; call the function outside of them."
    )
    weight = torch.zeros(5, 4, dtype=torch.float64)
    with pytest.raises(GradientError) as caught:
        torch.func.grad(lambda h: from_logits.entropy(Projection(h, weight)))(LOGITS)
    assert str(caught.value) == (
        "inside of torch.func transforms such as grad and vmap a penalty must read logits, got a "
        "projection; pass hidden @ weight.T."
    )
