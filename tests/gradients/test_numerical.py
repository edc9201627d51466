from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from steelyard.errors import GradientError
from steelyard.gradients import estimators
from steelyard.gradients.estimators import check_count


def f(x: Tensor) -> float:
    return float((x.sin() * x.exp()).sum() + x.prod())


def differences(fn: Callable[[Tensor], float], flat: Tensor, start: int, stop: int) -> Tensor:
    """The slopes of a plain function, which needs no event loop: nothing is waited for."""

    async def value(point: Tensor) -> float:
        return fn(point)

    coroutine = estimators.differences(value, flat, start, stop)
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    found: Tensor = stopped.value.value
    return found


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0])
def test_central_differences_agree_with_autograd(scale: float) -> None:
    x = (torch.tensor([0.3, -1.2, 0.7]) * scale).float()
    leaf = x.double().requires_grad_()
    (expected,) = torch.autograd.grad((leaf.sin() * leaf.exp()).sum() + leaf.prod(), leaf)
    torch.testing.assert_close(differences(f, x, 0, 3), expected, rtol=1e-6, atol=1e-7)


def test_a_range_gives_the_slopes_of_that_range() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    whole = differences(f, x, 0, 4)
    assert torch.equal(torch.cat([differences(f, x, 0, 1), differences(f, x, 1, 4)]), whole)


@pytest.mark.parametrize("x", [0.0, 0.25, -3.0, 1e4, -1e6])
def test_the_step_is_relative_to_values_above_one(x: float) -> None:
    seen: list[float] = []

    def spy(point: Tensor) -> float:
        seen.append(point.item())
        return 0.0

    differences(spy, torch.tensor([x], dtype=torch.float64), 0, 1)
    step = 1e-5 * max(1.0, abs(x))
    assert seen == pytest.approx([x + step, x - step], rel=0, abs=1e-3 * step)


def test_the_input_is_left_alone_and_seen_in_float64() -> None:
    x = torch.tensor([1.0, 2.0])
    seen: list[torch.dtype] = []

    def spy(point: Tensor) -> float:
        seen.append(point.dtype)
        point.zero_()
        return 0.0

    differences(spy, x, 0, 2)
    assert x.tolist() == [1.0, 2.0]
    assert seen == [torch.float64] * 4


@pytest.mark.parametrize(("at_once", "most_wanted"), [(1, 1), (2, 2), (64, 6)])
def test_several_at_once_give_the_same_numbers_and_overlap(at_once: int, most_wanted: int) -> None:
    x = torch.tensor([0.5, -0.5, 2.0])
    under_way, most = 0, 0

    async def slow(point: Tensor) -> float:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return f(point)

    found = asyncio.run(estimators.differences(slow, x, 0, 3, at_once))
    assert torch.equal(found, differences(f, x, 0, 3))
    assert most == most_wanted


def test_too_many_evaluations() -> None:
    check_count("t", 5_000)
    with pytest.raises(GradientError) as caught:
        check_count("t", 5_001)
    assert str(caught.value) == (
        "gradient='numerical' may take at most 10000 evaluations, got 10002 for 5001 log-probs "
        "(regularizer 't'): use smaller batches, gradient='score' with one penalty per datum, or "
        "write the term in torch."
    )
