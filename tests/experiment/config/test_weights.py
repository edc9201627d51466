"""Weights, schedules and ranges as config files write them."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard import schedules
from steelyard.experiment.config.weights import (
    SCHEDULES,
    check_config_weight,
    check_rate,
    is_range,
    range_of,
    schedule_of,
    weight_fields,
    with_value,
)


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
    assert check_config_weight(value) == value
    assert schedule_of(value) == made


def test_the_schedules_are_those_of_the_library() -> None:
    # Those that are made of other schedules have no form in a config.
    made_of_others = {"by_epoch", "join"}
    assert list(SCHEDULES) == [name for name in schedules.__all__ if name not in made_of_others]


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
        check_config_weight(value)


@pytest.mark.parametrize("value", [{"tune": [0.1, 1]}, {"tune": [0, 1], "log": False}])
def test_a_range_is_a_weight_but_no_learning_rate(value: Any) -> None:
    assert is_range(value)
    assert check_config_weight(value) == value
    with pytest.raises(ValueError, match="schedules: constant, cosine"):
        check_rate(value)


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        ({"at_most": 0.1}, {"at_most": 0.1}),
        ({"at_least": 0, "scale": 2}, {"at_least": 0.0, "scale": 2}),
        ({"at_most": {"linear": [1, 0.1, 5]}}, {"at_most": schedules.linear(1, 0.1, 5)}),
    ],
)
def test_a_bound_is_a_weight(value: Any, fields: dict[str, Any]) -> None:
    assert check_config_weight(value) == value
    assert weight_fields(value) == fields
    assert range_of(value) is None
    with pytest.raises(ValueError, match=r"^must be "):
        check_rate(value)


@pytest.mark.parametrize(
    "value",
    [
        {"at_most": 1, "at_least": 0},
        {"at_most": 0},
        {"at_most": "a"},
        {"at_most": 1, "weight": 1},
        {"at_most": 1, "scale": 0},
        {"at_most": {"tune": [2, 1]}},
        {"at_most": {"warmup": 3}},
    ],
)
def test_invalid_bounds_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        check_config_weight(value)


def test_a_bound_may_be_tuned() -> None:
    value = {"at_most": {"tune": [0.1, 1]}, "scale": 2}
    assert check_config_weight(value) == value
    assert range_of(value) == {"tune": [0.1, 1]}
    assert with_value(value, 0.5) == {"at_most": 0.5, "scale": 2}
    assert (range_of({"tune": [0, 1]}), with_value({"tune": [0, 1]}, 0.5)) == (
        {"tune": [0, 1]},
        0.5,
    )
    assert (range_of(0.5), weight_fields(0.5)) == (None, {"weight": 0.5})


def test_errors_state_the_form_of_the_schedule() -> None:
    with pytest.raises(ValueError, match=r"^must be >= 0$"):
        check_rate(-1)
    with pytest.raises(ValueError, match=r"^must be \{ warmup = \[v, steps\] \} \(steps must be"):
        check_rate({"warmup": [0.1, -1]})
    with pytest.raises(ValueError, match=r"^must be \{ linear = \[start, end, steps\] \}$"):
        check_rate({"linear": [0.1]})
