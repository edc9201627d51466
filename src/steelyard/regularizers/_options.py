"""Checks of the options of regularizers: each returns the value or raises `SpecError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steelyard.errors import SpecError
from steelyard.spec import is_finite, is_whole, lookup


# The checks take `Any`: the type of the value is part of what they check.
def require(holds: bool, option: str, rule: str, value: Any, regularizer: str) -> None:
    """Raise a `SpecError` that states the rule unless it holds."""
    if not holds:
        raise SpecError(f"{option} must be {rule}, got {value!r} (regularizer {regularizer!r}).")


def one_of(option: str, value: Any, allowed: tuple[str, ...], regularizer: str) -> None:
    choices = ", ".join(repr(choice) for choice in allowed)
    known = isinstance(value, str) and value in allowed
    require(known, option, f"one of {choices}", value, regularizer)


def number(option: str, value: Any, regularizer: str) -> float:
    require(is_finite(value), option, "a finite number", value, regularizer)
    return float(value)


def at_least(option: str, value: Any, lowest: float, regularizer: str) -> float:
    holds = is_finite(value) and value >= lowest
    require(holds, option, f"a finite number >= {lowest:g}", value, regularizer)
    return float(value)


def positive(option: str, value: Any, regularizer: str) -> float:
    require(is_finite(value) and value > 0, option, "a finite number > 0", value, regularizer)
    return float(value)


def fraction(option: str, value: Any, regularizer: str) -> float:
    holds = is_finite(value) and 0 <= value <= 1
    require(holds, option, "a number in [0, 1]", value, regularizer)
    return float(value)


def whole(option: str, value: Any, lowest: int, regularizer: str) -> int:
    holds = is_whole(value, at_least=lowest)
    require(holds, option, f"a whole number >= {lowest}", value, regularizer)
    return int(value)


def flag(option: str, value: Any, regularizer: str) -> None:
    require(isinstance(value, bool), option, "True or False", value, regularizer)


def function(option: str, value: Any, regularizer: str) -> Callable[..., Any]:
    """Return a function, importing it if a config file names it as `"package.module:attr"`."""
    resolved = lookup(value) if isinstance(value, str) and ":" in value else value
    rule = "a function, or 'package.module:attr' that names one"
    require(callable(resolved), option, rule, value, regularizer)
    return resolved  # type: ignore[no-any-return]  # callable


def resolve_source(regularizer: Any, option: str, *, optional: bool = False) -> None:
    """Check an option that names a field of each datum, or is a function `(datum, index)`.

    A `"package.module:attr"` from a config file is replaced by the function it names.
    """
    value = getattr(regularizer, option)
    if (optional and value is None) or (isinstance(value, str) and value and ":" not in value):
        return
    rule = "the name of a field, a function (datum, index), or 'package.module:attr'"
    holds = callable(value) or (isinstance(value, str) and ":" in value)
    require(holds, option, rule, value, regularizer.name)
    object.__setattr__(regularizer, option, function(option, value, regularizer.name))
