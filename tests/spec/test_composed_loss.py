"""Sums of a base loss and terms: the specs that they build, and that everything accepts them."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelyard import Pipeline, RegularizerSpec, compute, regularize, schedules
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.errors import SpecError
from steelyard.spec.regularizer import ComposedLoss
from tests.clients.sdk import engine
from tests.engine.by_hand import datum


def nll(data: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def l1(data: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).abs().mean()


def l2(data: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).square().mean()


L1, L2 = RegularizerSpec(l1, 1.0, "l1"), RegularizerSpec(l2, 2.0, "l2", every=3)
SPECS = (RegularizerSpec(l1, 0.1, "l1"), RegularizerSpec(l2, 0.5, "l2", every=3))
LOGPROBS = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0])]


def test_a_sum_has_the_specs_that_it_says() -> None:
    total: ComposedLoss = nll + 0.1 * L1 + L2 * 0.25
    assert total.loss_fn is nll
    assert total.regularizers == SPECS
    assert (L1.weight, L2.weight) == (1.0, 2.0)
    assert pickle.loads(pickle.dumps(total)) == total


@pytest.mark.parametrize("factor", [np.float64(0.5), np.float32(0.5), 1, 0])
def test_numbers_of_other_kinds(factor: Any) -> None:
    assert (factor * L2).weight == 2 * factor
    assert isinstance(factor * L2, RegularizerSpec)


def test_schedules_are_scaled() -> None:
    warm = 0.5 * RegularizerSpec(l2, schedules.warmup(2.0, steps=4), "l2")
    assert [warm.weight_at(step) for step in (0, 2, 4)] == [0.0, 0.5, 1.0]
    assert pickle.loads(pickle.dumps(warm)) == warm


def test_a_term_with_a_bound_is_added_as_it_is() -> None:
    bounded = RegularizerSpec(l2, name="l2", at_most=0.1)
    assert (nll + bounded).regularizers == (bounded,)
    with pytest.raises(
        SpecError, match=r"a term with a bound must not be multiplied.*factor 0.1.*'l2'"
    ):
        0.1 * bounded


def test_any_base_loss() -> None:
    class Loss(nn.Module):
        def forward(self, data: Any, logprobs: Any) -> Any:
            return nll(data, logprobs)

    class Base:
        def compute(self, data: Any, logprobs: Any) -> Any:
            return nll(data, logprobs)

    for base in (Loss(), Base(), partial(nll)):
        output = compute([], LOGPROBS, base + 0.1 * L1)
        assert output.loss_total == pytest.approx(1.1 * 7 / 3)


def test_pipelines_accept_a_sum() -> None:
    plain = Pipeline(nll, SPECS).compute([], LOGPROBS)
    summed = Pipeline(nll + 0.1 * L1 + 0.25 * L2).compute([], LOGPROBS)
    mixed = Pipeline(nll + 0.1 * L1, [SPECS[1]]).compute([], LOGPROBS)
    assert summed.loss_total == mixed.loss_total == plain.loss_total
    assert list(summed.regularizers) == list(mixed.regularizers) == ["l1", "l2"]


def test_a_composite_accepts_a_sum() -> None:
    activity = term(lambda hidden: hidden.square().mean(), 1.0, "activity")
    loss = CompositeLoss((lambda hidden: hidden.sum()) + 0.5 * activity)
    total = loss(hidden=torch.tensor([1.0, 3.0], requires_grad=True))
    assert total.item() == pytest.approx(4 + 0.5 * 5)


def test_a_client_accepts_a_sum() -> None:
    client = regularize(engine())
    data = [datum([1, 2, 3], [2, 3, 4])]
    output = client.forward_backward_custom(data, nll + 0.1 * L1).result()
    again = client.forward_backward_custom(data, nll, [SPECS[0]]).result()
    assert output.loss_total == again.loss_total
    assert client.regularizers == ()


@pytest.mark.parametrize("base", [L1, 3, None, "nll"])
def test_the_base_loss_comes_first(base: Any) -> None:
    with pytest.raises(SpecError, match=r"a sum of terms must begin with the base loss, a functio"):
        base + L2


def test_only_terms_are_added() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        nll + L1 + 0.1  # type: ignore[operator]


@pytest.mark.parametrize("weight", [1.0, schedules.constant(1.0)])
@pytest.mark.parametrize("factor", [float("nan"), "0.1", None, True, l2, -0.1])
def test_only_numbers_from_0_on_multiply(factor: Any, weight: Any) -> None:
    with pytest.raises(
        SpecError,
        match=r"a term must be multiplied by a finite number >= 0, got .* \(regularizer 'l1'",
    ):
        factor * RegularizerSpec(l1, weight, "l1")


def test_a_weight_that_becomes_too_large_is_refused() -> None:
    with pytest.raises(SpecError, match=r"weight must be a finite number >= 0, got inf"):
        1e200 * RegularizerSpec(l1, 1e200, "l1")
