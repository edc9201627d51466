"""Checks of the options that penalties share: each returns the value or raises `InputError`."""

from __future__ import annotations

from typing import Any

import numpy as np

from steelyard.errors import InputError

_INFINITY = float("inf")


# The checks take `Any`: the type of the value is part of what they check.
def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise InputError(f"{name} must be one of {choices}, got {value!r}.")
    return value


def number(name: str, value: Any, rule: str = "a finite number") -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.integer | np.floating)
        or not -_INFINITY < value < _INFINITY
    ):
        raise InputError(f"{name} must be {rule}, got {value!r}.")
    return float(value)


def positive(name: str, value: Any, rule: str = "a finite number > 0") -> float:
    checked = number(name, value, rule)
    if checked <= 0:
        raise InputError(f"{name} must be {rule}, got {value!r}.")
    return checked


def fraction(name: str, value: Any) -> float:
    rule = "a number in [0, 1]"
    checked = number(name, value, rule)
    if not 0 <= checked <= 1:
        raise InputError(f"{name} must be {rule}, got {value!r}.")
    return checked


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}.")
    return value


def class_axis(value: Any, rank: int) -> int:
    """Check the axis that holds the classes or components; return it as an index >= 0."""
    if rank == 0:
        raise InputError(
            "the array must have at least one axis (axis holds the classes), got shape ()."
        )
    if isinstance(value, bool) or not isinstance(value, int) or not -rank <= value < rank:
        raise InputError(
            f"axis must be an integer in [{-rank}, {rank - 1}] for an array of rank {rank}, "
            f"got {value!r}."
        )
    return value % rank
