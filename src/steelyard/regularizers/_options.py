"""Checks of the options of regularizers: each returns the value or says the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steelyard.errors import SpecError
from steelyard.spec import is_finite, is_whole, lookup


# The checks take `Any`: what comes in is what is being checked.
def require(kept: bool, option: str, rule: str, value: Any, regularizer: str) -> None:
    if not kept:
        raise SpecError(f"{option} must be {rule}, got {value!r} (regularizer {regularizer!r}).")


def one_of(option: str, value: Any, allowed: tuple[str, ...], regularizer: str) -> None:
    choices = ", ".join(repr(choice) for choice in allowed)
    known = isinstance(value, str) and value in allowed
    require(known, option, f"one of {choices}", value, regularizer)


def number(option: str, value: Any, regularizer: str) -> float:
    require(is_finite(value), option, "a finite number", value, regularizer)
    return float(value)


def at_least(option: str, value: Any, lowest: float, regularizer: str) -> float:
    kept = is_finite(value) and value >= lowest
    require(kept, option, f"a finite number >= {lowest:g}", value, regularizer)
    return float(value)


def positive(option: str, value: Any, regularizer: str) -> float:
    require(is_finite(value) and value > 0, option, "a finite number > 0", value, regularizer)
    return float(value)


def fraction(option: str, value: Any, regularizer: str) -> float:
    kept = is_finite(value) and 0 <= value <= 1
    require(kept, option, "a number in [0, 1]", value, regularizer)
    return float(value)


def whole(option: str, value: Any, lowest: int, regularizer: str) -> int:
    kept = is_whole(value, at_least=lowest)
    require(kept, option, f"a whole number >= {lowest}", value, regularizer)
    return int(value)


def flag(option: str, value: Any, regularizer: str) -> None:
    require(isinstance(value, bool), option, "True or False", value, regularizer)


def function(option: str, value: Any, regularizer: str) -> Callable[..., Any]:
    """A function, or what a config file's `"package.module:attr"` stands for."""
    found = lookup(value) if isinstance(value, str) and ":" in value else value
    rule = "a function, or 'package.module:attr' that names one"
    require(callable(found), option, rule, value, regularizer)
    return found  # type: ignore[no-any-return]  # callable


def settle_source(regularizer: Any, option: str, *, optional: bool = False) -> None:
    """Check where a value of each datum comes from: a field, or a function `(datum, index)`.

    A function that a config file names is imported, and takes the place of its name.
    """
    value = getattr(regularizer, option)
    if (optional and value is None) or (isinstance(value, str) and value and ":" not in value):
        return
    rule = "the name of a field, a function (datum, index), or 'package.module:attr'"
    kept = callable(value) or (isinstance(value, str) and ":" in value)
    require(kept, option, rule, value, regularizer.name)
    object.__setattr__(regularizer, option, function(option, value, regularizer.name))
