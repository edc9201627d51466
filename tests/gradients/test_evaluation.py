from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from steelyard.errors import GradientError, NonFiniteError
from steelyard.gradients import (
    Question,
    aevaluate,
    aslopes,
    check_gradient,
    evaluate,
    evaluate_coroutine,
    flatten,
    slopes,
    slopes_coroutine,
)
from steelyard.spec import Gradient


def ask(fn: Callable[..., Any], gradient: Gradient = "auto", **changes: Any) -> Question:
    layout, flat = flatten([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    return Question("t", fn, changes.pop("options", {}), gradient, [], layout, flat, **changes)


def square(_: Any, logprobs: list[torch.Tensor]) -> Any:
    return torch.cat(logprobs).square().sum(), {"count": 3}


async def asquare(data: Any, logprobs: list[torch.Tensor]) -> Any:
    return square(data, logprobs)


@pytest.mark.parametrize("gradient", ["auto", "autograd"])
def test_value_and_gradient(gradient: Gradient) -> None:
    found = evaluate(ask(square, gradient))
    assert (found.value, found.custom, found.method) == (14.0, {"count": 3.0}, "autograd")
    assert found.gradient is not None
    assert found.gradient.tolist() == [2.0, 4.0, 6.0]
    assert found.duration >= found.gradient_duration > 0


def test_the_async_ways_give_the_same() -> None:
    for found in (asyncio.run(aevaluate(ask(asquare))), evaluate_coroutine(ask(asquare))):
        assert found.value == 14.0
        assert found.gradient is not None
        assert found.gradient.tolist() == [2.0, 4.0, 6.0]


def test_options_reach_the_term() -> None:
    def scaled(_: Any, logprobs: list[torch.Tensor], scale: float) -> torch.Tensor:
        return scale * logprobs[0].sum()

    assert evaluate(ask(scaled, options={"scale": 10.0})).value == 30.0


def test_a_constant_has_no_gradient() -> None:
    found = evaluate(ask(lambda d, lp: 1.0))
    assert (found.value, found.gradient, found.method) == (1.0, None, None)


def test_autograd_demands_a_path() -> None:
    with pytest.raises(GradientError, match="one with no path to them") as caught:
        evaluate(ask(lambda d, lp: 1.0, "autograd"))
    for cure in ("gradient='score'", "gradient='numerical'", "gradient='none'"):
        assert cure in str(caught.value)


def test_none_is_not_differentiated_and_gets_plain_tensors() -> None:
    def detached(_: Any, logprobs: list[torch.Tensor]) -> float:
        return float(logprobs[0].numpy().sum())

    found = evaluate(ask(detached, "none"))
    assert (found.value, found.gradient, found.method) == (3.0, None, None)


@pytest.mark.parametrize("gradient", ["none", "score"])
def test_what_such_a_term_writes_to_is_its_own(gradient: Gradient) -> None:
    def vandal(_: Any, logprobs: list[torch.Tensor]) -> Any:
        logprobs[0].zero_()
        return torch.zeros(2) if gradient == "score" else 0.0

    question = ask(vandal, gradient)
    evaluate(question)
    assert question.flat.tolist() == [1.0, 2.0, 3.0]


def test_score() -> None:
    found = evaluate(ask(lambda d, lp: [1.0, 3.0], "score"))
    assert (found.value, found.method) == (2.0, "score")
    assert found.gradient is not None
    assert found.gradient.tolist() == [-1.0, -1.0, 1.0]
    assert found.gradient.dtype == torch.float32


def test_slopes_agree_with_autograd() -> None:
    expected = evaluate(ask(square)).gradient
    assert expected is not None
    numerical, numerical_async = ask(square, "numerical"), ask(asquare, "numerical")
    for found in (
        slopes(numerical, 0, 3),
        asyncio.run(aslopes(numerical_async, 0, 3)),
        slopes_coroutine(numerical_async, 0, 3),
    ):
        torch.testing.assert_close(found, expected.double(), rtol=1e-8, atol=1e-8)


def nowhere(_: Any, logprobs: list[torch.Tensor]) -> Any:
    return torch.tensor(math.nan)


@pytest.mark.parametrize("way", [evaluate, lambda q: slopes(q, 0, 1)], ids=["evaluate", "slopes"])
def test_a_value_that_is_not_finite(way: Callable[[Question], object]) -> None:
    with pytest.raises(NonFiniteError, match="the value of regularizer 't' must be finite"):
        way(ask(nowhere))
    way(ask(nowhere, check_finite=False))


def test_a_gradient_that_is_not_finite() -> None:
    check_gradient("t", torch.tensor([1e38, 1e38]))
    with pytest.raises(NonFiniteError, match="the gradient of regularizer 't'") as caught:
        check_gradient("t", torch.tensor([math.inf, math.nan]))
    assert caught.value.kind == "nan"
    with pytest.raises(NonFiniteError) as caught:
        check_gradient("t", torch.tensor([1.0, -math.inf]))
    assert caught.value.kind == "inf"
