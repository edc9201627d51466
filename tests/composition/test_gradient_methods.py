from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import DetachedTermWarning, Pipeline, RegularizerSpec
from steelyard.errors import GradientError

from .terms import LOGPROBS, constant, l2, nll


def outputs(fn: Any, gradient: Any, **more: Any) -> Any:
    spec = RegularizerSpec(fn, 0.5, "t", gradient=gradient, **more)
    return Pipeline(nll, [spec], track_grad_norms=True).compute([], LOGPROBS)


async def al2(data: Any, logprobs: list[Tensor]) -> Tensor:
    return l2(data, logprobs)


@pytest.mark.parametrize("run_in", ["auto", "inline", "thread", "process"])
def test_numerical_is_autograd_by_other_means(run_in: Any) -> None:
    expected = outputs(l2, "autograd", run_in="inline")
    found = outputs(lambda d, lp: float(l2(d, lp).item()), "numerical", run_in=run_in)
    assert found.loss_total == expected.loss_total
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-6, atol=1e-6)
    assert found.regularizers["t"].grad_norm == pytest.approx(
        expected.regularizers["t"].grad_norm, rel=1e-6
    )


@pytest.mark.parametrize("run_in", ["async", "thread"])
def test_numerical_of_a_coroutine(run_in: Any) -> None:
    expected = outputs(l2, "autograd")
    found = outputs(al2, "numerical", run_in=run_in)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("run_in", ["thread", "inline"])
def test_too_many_evaluations_are_refused_before_the_first(run_in: Any) -> None:
    calls = 0

    def count(_: Any, logprobs: Any) -> float:
        nonlocal calls
        calls += 1
        return 0.0

    spec = RegularizerSpec(count, 1.0, "t", gradient="numerical", run_in=run_in)
    with pytest.raises(GradientError, match="got 12000 for 6000 log-probs"):
        Pipeline(nll, [spec]).compute([], [torch.zeros(6000)])
    assert calls == 0


@pytest.mark.parametrize("run_in", ["auto", "process"])
def test_score(run_in: Any) -> None:
    found = outputs(lambda d, lp: [1.0, 2.0, 6.0], "score", run_in=run_in)
    assert found.regularizers["t"].value == 3.0
    base = Pipeline(nll).compute([], LOGPROBS)
    pulls = [g - b for g, b in zip(found.gradients, base.gradients, strict=True)]
    for pull, expected in zip(pulls, (-1.0, -0.5, 1.5), strict=True):
        torch.testing.assert_close(pull, torch.full_like(pull, 0.5 * expected))


def test_none_says_that_it_is_meant_so() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = outputs(l2, "none")
    assert found.regularizers["t"].grad_norm is None
    assert found.regularizers["t"].contribution == pytest.approx(0.5 * 16.51)
    torch.testing.assert_close(found.gradients, Pipeline(nll).compute([], LOGPROBS).gradients)
    assert found.cosines == {}


def test_autograd_insists() -> None:
    with pytest.raises(GradientError, match="regularizer 't'"):
        outputs(constant, "autograd")


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_a_term_without_a_path_warns_once(run_in: Any, tracked: bool) -> None:
    spec = RegularizerSpec(constant, 0.5, "t", run_in=run_in)
    pipeline = Pipeline(nll, [spec], track_grad_norms=tracked)
    with pytest.warns(DetachedTermWarning) as caught:
        output = pipeline.compute([], LOGPROBS)
    (warning,) = caught
    assert warning.filename == __file__
    for part in ("regularizer 't' has no gradient", "gradient='score'", "gradient='numerical'"):
        assert part in str(warning.message)
    assert output.regularizers["t"].contribution == 1.0
    assert output.regularizers["t"].grad_norm is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline.compute([], LOGPROBS)
        pipeline.set_weight("t", 0.1)
        pipeline.compute([], LOGPROBS)


def test_a_graph_that_leads_elsewhere_is_no_path() -> None:
    own = torch.tensor(3.0, requires_grad=True)
    spec = RegularizerSpec(lambda d, lp: own * 2, 1.0, "elsewhere")
    with pytest.warns(DetachedTermWarning, match="'elsewhere'"):
        Pipeline(nll, [spec]).compute([], LOGPROBS)
    assert own.grad is None


def test_a_base_loss_without_a_gradient_warns_too() -> None:
    with pytest.warns(DetachedTermWarning, match="the base loss has no gradient"):
        output = Pipeline(constant, [RegularizerSpec(l2, 1.0, "l2")]).compute([], LOGPROBS)
    assert output.loss_total == pytest.approx(18.51)


def test_nothing_has_a_gradient() -> None:
    with pytest.warns(DetachedTermWarning):
        output = Pipeline(constant, [], track_grad_norms=True).compute([], LOGPROBS)
    assert output.total_grad_norm == 0.0
    assert [g.tolist() for g in output.gradients] == [[0.0] * 3, [0.0], [0.0] * 2]
