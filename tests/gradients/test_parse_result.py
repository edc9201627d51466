from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import NonFiniteError, TermResultError
from steelyard.gradients.parse_result import as_scalar, check_finite, split_metrics


@pytest.mark.parametrize(
    "loss",
    [
        2.5,
        Fraction(5, 2),
        np.float32(2.5),
        np.array(2.5),
        np.array([2.5]),
        torch.tensor(2.5),
        torch.tensor([[2.5]]),
        torch.tensor(2.5, dtype=torch.bfloat16),
    ],
)
def test_what_counts_as_a_scalar(loss: object) -> None:
    scalar = as_scalar("t", loss)
    assert scalar.shape == ()
    assert scalar.item() == 2.5


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.zeros(3), "regularizer 't' must return a scalar, got the shape [3]: reduce it"),
        (np.zeros((2, 2)), "regularizer 't' must return a scalar, got the shape [2, 2]"),
        (torch.zeros(0), "regularizer 't' must return a scalar, got the shape [0]"),
        ("1.0", "regularizer 't' must return a scalar tensor or a number, got str."),
        (None, "regularizer 't' must return a scalar tensor or a number, got NoneType."),
        (True, "regularizer 't' must return a scalar tensor or a number, got bool."),
        ([1.0], "regularizer 't' must return a scalar tensor or a number, got list."),
        (torch.tensor(1j), "regularizer 't' must return a real loss, got torch.complex64."),
    ],
)
def test_what_does_not(loss: object, message: str) -> None:
    with pytest.raises(TermResultError) as caught:
        as_scalar("t", loss)
    assert str(caught.value).startswith(message)
    assert caught.value.term == "t"


def test_the_base_loss_is_called_so() -> None:
    with pytest.raises(TermResultError, match=r"^the base loss must return a scalar"):
        as_scalar("base", torch.zeros(2))


@pytest.mark.parametrize(
    ("returned", "metrics"),
    [
        (1.0, {}),
        ((1.0, None), {}),
        ((1.0, {}), {}),
        ((1.0, {"a": 1, "b": True}), {"a": 1.0, "b": 1.0}),
        ((1.0, {"t": torch.tensor(2.0, requires_grad=True)}), {"t": 2.0}),
        ((1.0, {"n": np.float64(3.0)}), {"n": 3.0}),
    ],
)
def test_metrics_become_floats(returned: object, metrics: dict[str, float]) -> None:
    loss, custom = split_metrics("t", returned)
    assert loss == 1.0
    assert custom == metrics
    assert all(type(value) is float for value in custom.values())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((1.0, {}, 3), "regularizer 't' must return a loss or (loss, metrics), got a tuple of 3"),
        ((1.0,), "regularizer 't' must return a loss or (loss, metrics), got a tuple of 1"),
        ((1.0, [2]), "the metrics of regularizer 't' must be a mapping of names to numbers, got"),
        ((1.0, {1: 2.0}), "the metrics of regularizer 't' must have string names, got 1."),
        ((1.0, {"a": "x"}), "the metric 'a' of regularizer 't' must be a number, got 'x'."),
        ((1.0, {"a": torch.zeros(2)}), "the metric 'a' of regularizer 't' must be a number, got"),
        ((1.0, {"a": None}), "the metric 'a' of regularizer 't' must be a number, got None."),
    ],
)
def test_metrics_that_are_none(returned: object, message: str) -> None:
    with pytest.raises(TermResultError) as caught:
        split_metrics("t", returned)
    assert str(caught.value).startswith(message)


class Thenable:
    def __await__(self) -> Any:
        yield
        return 3.0


async def late() -> tuple[float, dict[str, float]]:
    await asyncio.sleep(0)
    return 2.0, {"a": 1.0}


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_an_awaitable_is_awaited(in_a_loop: bool) -> None:
    def split() -> list[Any]:
        return [split_metrics("t", late()), split_metrics("t", Thenable())]

    async def inside() -> list[Any]:
        return split()

    found = asyncio.run(inside()) if in_a_loop else split()
    assert found == [(2.0, {"a": 1.0}), (3.0, {})]


@pytest.mark.parametrize(
    ("value", "kind"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "inf")]
)
def test_not_finite(value: float, kind: str) -> None:
    check_finite("t", 1.0)
    with pytest.raises(NonFiniteError, match="the value of regularizer 't' must be finite") as e:
        check_finite("t", value)
    assert (e.value.kind, e.value.term) == (kind, "t")


@pytest.mark.parametrize(
    ("term", "cure"),
    [
        ("t", "mend the term; on_error='skip' leaves it out of such steps."),
        ("base", "mend the loss or the data, or lower the learning rate if it was finite before."),
    ],
)
def test_the_cure_of_a_value_that_is_not_finite_can_be_followed(term: str, cure: str) -> None:
    with pytest.raises(NonFiniteError) as caught:
        check_finite(term, float("nan"))
    assert str(caught.value).endswith(f"must be finite, got nan: {cure}")
