"""Weights, schedules and ranges as config files write them."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.experiment.config_weights import (
    SCHEDULES,
    check_rate,
    check_weight,
    is_range,
    schedule_of,
)
from steelyard.spec import schedules


@pytest.mark.parametrize(
    ("value", "made"),
    [
        (0.5, 0.5),
        ({"constant": [0.2]}, schedules.constant(0.2)),
        ({"cosine": [1, 0, 5]}, schedules.cosine(1, 0, 5)),
        ({"exponential": [1, 0.5]}, schedules.exponential(1, 0.5)),
        ({"linear": [0, 1, 5]}, schedules.linear(0, 1, 5)),
        ({"piecewise": {"0": 0.1, "100": 0.5}}, schedules.piecewise({0: 0.1, 100: 0.5})),
        ({"warmup": [0.1, 10]}, schedules.warmup(0.1, 10)),
    ],
)
def test_every_schedule_can_be_written(value: Any, made: Any) -> None:
    assert check_weight(value) == value
    assert schedule_of(value) == made


def test_the_schedules_are_those_of_the_library() -> None:
    # By epoch, a schedule of another: a run counts steps.
    assert list(SCHEDULES) == [name for name in schedules.__all__ if name != "by_epoch"]


@pytest.mark.parametrize(
    "value",
    [
        {"tune": [0.1]},
        {"tune": [0, 1], "log": True},
        {"tune": [0.1, 1], "log": 1},
        {"tune": [0.1, 1], "step": 2},
        {"tune": ["a", 1]},
        {"warmup": [1, 2], "linear": [0, 1, 2]},
        {"piecewise": [0, 1]},
        {"piecewise": {"1": 1}},
        {"warmup": 3},
        True,
        None,
    ],
)
def test_invalid_weights_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        check_weight(value)


@pytest.mark.parametrize("value", [{"tune": [0.1, 1]}, {"tune": [0, 1], "log": False}])
def test_a_range_is_a_weight_but_no_learning_rate(value: Any) -> None:
    assert is_range(value)
    assert check_weight(value) == value
    with pytest.raises(ValueError, match="schedules: constant, cosine"):
        check_rate(value)


def test_errors_state_the_form_of_the_schedule() -> None:
    with pytest.raises(ValueError, match=r"^must be >= 0$"):
        check_rate(-1)
    with pytest.raises(ValueError, match=r"^must be \{ warmup = \[v, steps\] \} \(steps must be"):
        check_rate({"warmup": [0.1, -1]})
    with pytest.raises(ValueError, match=r"^must be \{ linear = \[start, end, steps\] \}$"):
        check_rate({"linear": [0.1]})
