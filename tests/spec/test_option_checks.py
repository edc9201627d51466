"""Checks of options, each one alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from steelyard.errors import SpecError
from steelyard.spec.checks import OptionChecks

CHECKS = OptionChecks("reward")
FUNCTION = "a function, or 'package.module:attr' that names one"


@pytest.mark.parametrize(
    ("check", "arguments", "expected"),
    [
        (CHECKS.number, (2,), 2.0),
        (CHECKS.at_least, (0, 0), 0.0),
        (CHECKS.positive, (0.5,), 0.5),
        (CHECKS.fraction, (1,), 1.0),
        (CHECKS.whole, (3, 3), 3),
        (CHECKS.text, ("a",), "a"),
        (CHECKS.function, (abs,), abs),
        (CHECKS.function, ("math:sqrt",), math.sqrt),
    ],
)
def test_valid_values_are_returned(check: Any, arguments: tuple[Any, ...], expected: Any) -> None:
    found = check("size", *arguments, "name")
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("check", "arguments", "rule"),
    [
        (CHECKS.number, (math.nan,), "a finite number"),
        (CHECKS.number, (True,), "a finite number"),
        (CHECKS.at_least, (0.5, 1), "a finite number >= 1"),
        (CHECKS.positive, (0,), "a finite number > 0"),
        (CHECKS.fraction, (1.1,), "a number in [0, 1]"),
        (CHECKS.whole, (2.0, 0), "a whole number >= 0"),
        (CHECKS.whole, (2, 3), "a whole number >= 3"),
        (CHECKS.flag, (None,), "True or False"),
        (CHECKS.one_of, ("c", ("a", "b")), "one of 'a', 'b'"),
        (CHECKS.one_of, (["a"], ("a", "b")), "one of 'a', 'b'"),
        (CHECKS.text, ("",), "a non-empty string"),
        (CHECKS.text, (3,), "a non-empty string"),
        (CHECKS.function, ("loose",), FUNCTION),
        (CHECKS.function, ("math:pi",), FUNCTION),
    ],
)
def test_each_rule(check: Any, arguments: tuple[Any, ...], rule: str) -> None:
    with pytest.raises(SpecError) as caught:
        check("size", *arguments, "name")
    assert str(caught.value) == f"size must be {rule}, got {arguments[0]!r} (reward 'name')."
