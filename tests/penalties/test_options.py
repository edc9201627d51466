"""Checks of the options that penalties share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from steelyard.errors import InputError
from steelyard.penalties import _checks


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (_checks.number, 2, 2.0),
        (_checks.number, -1.5, -1.5),
        (_checks.number, np.float32(0.5), 0.5),
        (_checks.number, np.int64(3), 3.0),
        (_checks.positive, 1e-300, 1e-300),
        (_checks.fraction, 0, 0.0),
        (_checks.fraction, 1.0, 1.0),
    ],
)
def test_numbers_become_floats(check: Any, value: Any, expected: float) -> None:
    found = check("scale", value)
    assert (type(found), found) == (float, expected)


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        (_checks.number, math.nan, "a finite number, got nan"),
        (_checks.number, -math.inf, "a finite number, got -inf"),
        (_checks.number, True, "a finite number, got True"),
        (_checks.number, "1", "a finite number, got '1'"),
        (_checks.number, None, "a finite number, got None"),
        (_checks.number, 1j, "a finite number, got 1j"),
        (_checks.positive, 0, "a finite number > 0, got 0"),
        (_checks.positive, math.inf, "a finite number > 0, got inf"),
        (_checks.fraction, 1.5, "a number in [0, 1], got 1.5"),
        (_checks.fraction, math.nan, "a number in [0, 1], got nan"),
        (_checks.flag, 1, "True or False, got 1"),
        (_checks.flag, None, "True or False, got None"),
    ],
)
def test_a_value_that_breaks_the_rule(check: Any, value: Any, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        check("scale", value)
    assert str(caught.value) == f"scale must be {rule}."


def test_a_rule_of_the_caller() -> None:
    with pytest.raises(InputError) as caught:
        _checks.positive("clip", -1, "None or a finite number > 0")
    assert str(caught.value) == "clip must be None or a finite number > 0, got -1."


def test_one_of() -> None:
    assert _checks.one_of("mode", "soft", ("soft", "hard")) == "soft"
    for wrong in ("Soft", "", None, 0, ["soft"]):
        with pytest.raises(InputError) as caught:
            _checks.one_of("mode", wrong, ("soft", "hard"))
        assert str(caught.value) == f"mode must be one of 'soft', 'hard', got {wrong!r}."


def test_flags() -> None:
    assert _checks.flag("normalize", True) is True
    assert _checks.flag("normalize", False) is False


@pytest.mark.parametrize(("axis", "rank", "index"), [(-1, 3, 2), (0, 1, 0), (2, 3, 2), (-3, 3, 0)])
def test_the_class_axis_is_counted_from_zero(axis: int, rank: int, index: int) -> None:
    assert _checks.class_axis(axis, rank) == index


@pytest.mark.parametrize("axis", [2, -3, True, 1.0, None])
def test_a_class_axis_outside_the_array(axis: Any) -> None:
    with pytest.raises(InputError) as caught:
        _checks.class_axis(axis, 2)
    assert str(caught.value) == (
        f"axis must be an integer in [-2, 1] for an array of rank 2, got {axis!r}."
    )


def test_a_scalar_has_no_class_axis() -> None:
    with pytest.raises(InputError, match=r"at least one axis \(axis holds the classes\), got"):
        _checks.class_axis(-1, 0)
