"""Checks of the options that penalties share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from steelyard.errors import InputError
from steelyard.penalties import _options


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (_options.number, 2, 2.0),
        (_options.number, -1.5, -1.5),
        (_options.number, np.float32(0.5), 0.5),
        (_options.number, np.int64(3), 3.0),
        (_options.positive, 1e-300, 1e-300),
        (_options.fraction, 0, 0.0),
        (_options.fraction, 1.0, 1.0),
    ],
)
def test_numbers_become_floats(check: Any, value: Any, expected: float) -> None:
    found = check("scale", value)
    assert (type(found), found) == (float, expected)


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        (_options.number, math.nan, "a finite number, got nan"),
        (_options.number, -math.inf, "a finite number, got -inf"),
        (_options.number, True, "a finite number, got True"),
        (_options.number, "1", "a finite number, got '1'"),
        (_options.number, None, "a finite number, got None"),
        (_options.number, 1j, "a finite number, got 1j"),
        (_options.positive, 0, "a finite number > 0, got 0"),
        (_options.positive, math.inf, "a finite number > 0, got inf"),
        (_options.fraction, 1.5, "a number in [0, 1], got 1.5"),
        (_options.fraction, math.nan, "a number in [0, 1], got nan"),
        (_options.flag, 1, "True or False, got 1"),
        (_options.flag, None, "True or False, got None"),
    ],
)
def test_a_value_that_breaks_the_rule(check: Any, value: Any, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        check("scale", value)
    assert str(caught.value) == f"scale must be {rule}."


def test_a_rule_of_the_caller() -> None:
    with pytest.raises(InputError) as caught:
        _options.positive("clip", -1, "None or a finite number > 0")
    assert str(caught.value) == "clip must be None or a finite number > 0, got -1."


def test_one_of() -> None:
    assert _options.one_of("mode", "soft", ("soft", "hard")) == "soft"
    for wrong in ("Soft", "", None, 0, ["soft"]):
        with pytest.raises(InputError) as caught:
            _options.one_of("mode", wrong, ("soft", "hard"))
        assert str(caught.value) == f"mode must be one of 'soft', 'hard', got {wrong!r}."


def test_flags() -> None:
    assert _options.flag("normalize", True) is True
    assert _options.flag("normalize", False) is False


@pytest.mark.parametrize(("axis", "rank", "index"), [(-1, 3, 2), (0, 1, 0), (2, 3, 2), (-3, 3, 0)])
def test_the_class_axis_is_counted_from_zero(axis: int, rank: int, index: int) -> None:
    assert _options.class_axis(axis, rank) == index


@pytest.mark.parametrize("axis", [2, -3, True, 1.0, None])
def test_a_class_axis_outside_the_array(axis: Any) -> None:
    with pytest.raises(InputError) as caught:
        _options.class_axis(axis, 2)
    assert str(caught.value) == (
        f"axis must be an integer in [-2, 1] for an array of rank 2, got {axis!r}."
    )


def test_a_scalar_has_no_class_axis() -> None:
    with pytest.raises(InputError, match=r"at least one axis \(axis holds the classes\), got"):
        _options.class_axis(-1, 0)
