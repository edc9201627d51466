from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from steelyard.errors import GradientError, NonFiniteError
from steelyard.gradients.isolated import IsolatedCall
from steelyard.gradients.layout import flatten
from steelyard.spec.regularizer import Gradient


def call(fn: Callable[..., Any], gradient: Gradient = "auto", **changes: Any) -> IsolatedCall:
    layout, flat = flatten([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    return IsolatedCall("t", fn, changes.pop("options", {}), gradient, [], layout, flat, **changes)


def square(_: Any, logprobs: list[Tensor]) -> Any:
    return torch.cat(logprobs).square().sum(), {"count": 3}


async def asquare(data: Any, logprobs: list[Tensor]) -> Any:
    await asyncio.sleep(0)
    return square(data, logprobs)


@pytest.mark.parametrize("gradient", ["auto", "autograd"])
def test_value_and_gradient(gradient: Gradient) -> None:
    found = call(square, gradient).run()
    assert (found.value, found.custom, found.method) == (14.0, {"count": 3.0}, "autograd")
    assert found.gradient is not None
    assert found.gradient.tolist() == [2.0, 4.0, 6.0]
    assert found.duration >= found.gradient_duration > 0


def test_the_async_ways_give_the_same() -> None:
    asked = call(asquare, is_async=True)
    for found in (asyncio.run(asked.arun()), asked.run()):
        assert found.value == 14.0
        assert found.gradient is not None
        assert found.gradient.tolist() == [2.0, 4.0, 6.0]


def test_it_pickles() -> None:
    found = cloudpickle.loads(cloudpickle.dumps(call(square))).run()
    assert found.gradient.tolist() == [2.0, 4.0, 6.0]


def test_options_reach_the_term() -> None:
    def scaled(_: Any, logprobs: list[Tensor], scale: float) -> Tensor:
        return scale * logprobs[0].sum()

    assert call(scaled, options={"scale": 10.0}).run().value == 30.0


@pytest.mark.parametrize("gradient", ["auto", "autograd"])
def test_a_constant_has_no_gradient(gradient: Gradient) -> None:
    found = call(lambda d, lp: 1.0, gradient).run()
    assert (found.value, found.gradient, found.method) == (1.0, None, None)


def test_none_is_not_differentiated_and_gets_plain_tensors() -> None:
    def detached(_: Any, logprobs: list[Tensor]) -> float:
        return float(logprobs[0].numpy().sum())

    found = call(detached, "none").run()
    assert (found.value, found.gradient, found.method) == (3.0, None, None)


@pytest.mark.parametrize("gradient", ["none", "score"])
def test_what_such_a_term_writes_to_is_its_own(gradient: Gradient) -> None:
    def vandal(_: Any, logprobs: list[Tensor]) -> Any:
        logprobs[0].zero_()
        return torch.zeros(2) if gradient == "score" else 0.0

    asked = call(vandal, gradient)
    asked.run()
    assert asked.flat.tolist() == [1.0, 2.0, 3.0]


def test_score() -> None:
    found = call(lambda d, lp: [1.0, 3.0], "score").run()
    assert (found.value, found.method) == (2.0, "score")
    assert found.gradient is not None
    assert found.gradient.tolist() == [-1.0, -1.0, 1.0]
    assert found.gradient.dtype == torch.float32


def test_slopes_agree_with_autograd() -> None:
    expected = call(square).run().gradient
    assert expected is not None
    plain, later = call(square, "numerical"), call(asquare, "numerical", is_async=True)
    for found in (
        plain.slopes(0, 3),
        asyncio.run(later.aslopes(0, 3)),
        later.slopes(0, 3),
    ):
        torch.testing.assert_close(found, expected.double(), rtol=1e-8, atol=1e-8)


def test_run_leaves_a_numerical_gradient_out_and_run_whole_does_not() -> None:
    asked = call(square, "numerical")
    found = asked.run()
    assert (found.value, found.gradient, found.method) == (14.0, None, None)
    found = asked.run_whole()
    assert (found.value, found.method, found.custom) == (14.0, "numerical", {"count": 3.0})
    assert found.gradient is not None
    assert found.gradient.dtype == torch.float32
    torch.testing.assert_close(found.gradient, torch.tensor([2.0, 4.0, 6.0]))
    assert found.gradient_duration > 0
    assert call(square).run_whole().method == "autograd"


def test_too_many_evaluations_are_refused_before_the_first() -> None:
    layout, flat = flatten(torch.zeros(5_001))
    with pytest.raises(GradientError, match="got 10002 for 5001 log-probs"):
        IsolatedCall("t", pytest.fail, {}, "numerical", [], layout, flat).run_whole()


def nowhere(_: Any, logprobs: list[Tensor]) -> Any:
    return torch.tensor(math.nan)


@pytest.mark.parametrize(
    "way", [IsolatedCall.run, lambda asked: asked.slopes(0, 1)], ids=["run", "slopes"]
)
def test_a_value_that_is_not_finite(way: Callable[[IsolatedCall], object]) -> None:
    with pytest.raises(NonFiniteError, match="the value of regularizer 't' must be finite"):
        way(call(nowhere))
    way(call(nowhere, check_finite=False))


def steep(_: Any, logprobs: list[Tensor]) -> Tensor:
    return (logprobs[0] - 1.0).sqrt().sum()  # at 0, where the slope is infinite


def test_a_gradient_that_is_not_finite() -> None:
    with pytest.raises(NonFiniteError, match="the gradient of regularizer 't' must be finite"):
        call(steep).run()
    found = call(steep, check_finite=False).run()
    assert found.gradient is not None
    assert found.gradient.tolist() == [math.inf, 0.5, 0.0]


def test_slopes_that_are_not_finite() -> None:
    evaluation = call(square, "numerical").run()
    slopes = torch.tensor([1.0, math.nan, 1.0])
    with pytest.raises(NonFiniteError, match="the gradient of regularizer 't'"):
        call(square, "numerical").with_slopes(evaluation, slopes, 1.0)
    unchecked = call(square, "numerical", check_finite=False)
    assert unchecked.with_slopes(evaluation, slopes, 1.0).gradient is not None


# Extra inputs.


@dataclass(frozen=True)
class Layer:
    weight: Tensor
    bias: Tensor | None = None


WEIGHT, BIAS = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])


def scaled_layers(_: Any, logprobs: Any, layers: list[Layer], **others: Any) -> Tensor:
    return torch.stack([(each.weight * (i + 1)).sum() for i, each in enumerate(layers)]).sum()


def with_extra(
    extra: Mapping[str, Any], gradient: Gradient = "auto", fn: Any = scaled_layers
) -> IsolatedCall:
    return call(fn, gradient, extra=extra)


def test_a_shared_tensor_is_differentiated_once() -> None:
    weight = WEIGHT.clone().requires_grad_()
    layers = [Layer(weight, BIAS), Layer(weight)]
    found = with_extra({"layers": layers, "others": layers}).run()
    assert found.method == "autograd"
    rows = {
        need: [g if g is None else g.tolist() for g in row] for need, row in found.extra.items()
    }
    assert rows == {"layers": [[3.0, 3.0], None], "others": [None, None]}


def test_no_path_to_extra_inputs() -> None:
    found = with_extra({"layers": [Layer(WEIGHT)]}, fn=lambda d, lp, layers: lp[0].sum()).run()
    assert found.extra == {}
    assert found.gradient is not None


def test_without_a_gradient_extra_inputs_are_plain() -> None:
    def read(_: Any, logprobs: Any, layers: list[Layer]) -> float:
        return float(layers[0].weight.numpy().sum())

    found = with_extra({"layers": [Layer(WEIGHT.clone().requires_grad_())]}, "none", read).run()
    assert (found.value, found.gradient, found.extra) == (3.0, None, {})
