"""Checks of numbers, and of the options of regularizers and rewards."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from steelyard.errors import SpecError
from steelyard.spec.registry import lookup

# Asking an abstract class takes long, and these are asked at every step: the usual types first.
_REAL = (float, int, numbers.Real)
_WHOLE = (int, numbers.Integral)


def is_finite(value: object) -> bool:
    """Whether `value` is a real number that a finite float can hold."""
    if isinstance(value, bool) or not isinstance(value, _REAL):
        return False
    try:
        # Not math.isfinite: Dynamo can only compare a number that depends on the step.
        return -math.inf < float(value) < math.inf
    except OverflowError:
        return False


def is_whole(value: object, *, at_least: int) -> bool:
    """Whether `value` is a whole number of at least that size."""
    whole = isinstance(value, _WHOLE) and not isinstance(value, bool)
    return whole and int(value) >= at_least  # type: ignore[call-overload]  # whole


def is_array(value: object) -> bool:
    """Whether `value` is an array; a NumPy scalar is a number."""
    # In this order: Dynamo cannot list the attributes of a number that depends on the step.
    return not isinstance(value, numbers.Real) and hasattr(value, "shape")


def is_traced(scalar: Any) -> bool:  # an array without axes, of any library
    """Whether an array without axes has no value to read: inside `jax.jit` or `torch.compile`."""
    tensor = hasattr(type(scalar), "__torch_function__")
    return (tensor and sys.modules["torch"].compiler.is_compiling()) or not _is_readable(scalar)


def _is_readable(scalar: Any) -> bool:
    try:
        float(scalar)
    except (TypeError, RuntimeError):  # what JAX's tracers and torch's fake tensors raise
        return False
    return True


@dataclass(frozen=True)
class OptionChecks:
    """Checks that return the value of an option or raise `SpecError`.

    Each takes the name of the option, its value, the rule's own arguments, and the name of the
    regularizer or reward. The values are `Any`: their type is part of what is checked.

    Attributes:
        kind: what has the options: `"regularizer"` or `"reward"`.

    Example:
        >>> OptionChecks("reward").positive("scale", 2, "length")
        2.0
    """

    kind: str

    def require(self, holds: bool, option: str, rule: str, value: Any, name: str) -> None:
        """Raise a `SpecError` that states the rule unless it holds."""
        if not holds:
            raise SpecError(f"{option} must be {rule}, got {value!r} ({self.kind} {name!r}).")

    def one_of(self, option: str, value: Any, allowed: tuple[str, ...], name: str) -> None:
        """Check that a text is one of those that are allowed."""
        choices = ", ".join(repr(choice) for choice in allowed)
        known = isinstance(value, str) and value in allowed
        self.require(known, option, f"one of {choices}", value, name)

    def number(self, option: str, value: Any, name: str) -> float:
        """Check that a number is finite."""
        self.require(is_finite(value), option, "a finite number", value, name)
        return float(value)

    def at_least(self, option: str, value: Any, lowest: float, name: str) -> float:
        """Check that a number is finite and has at least that size."""
        holds = is_finite(value) and value >= lowest
        self.require(holds, option, f"a finite number >= {lowest:g}", value, name)
        return float(value)

    def positive(self, option: str, value: Any, name: str) -> float:
        """Check that a number is finite and above 0."""
        self.require(is_finite(value) and value > 0, option, "a finite number > 0", value, name)
        return float(value)

    def fraction(self, option: str, value: Any, name: str) -> float:
        """Check that a number is in [0, 1]."""
        holds = is_finite(value) and 0 <= value <= 1
        self.require(holds, option, "a number in [0, 1]", value, name)
        return float(value)

    def whole(self, option: str, value: Any, lowest: int, name: str) -> int:
        """Check that a number is whole and has at least that size."""
        holds = is_whole(value, at_least=lowest)
        self.require(holds, option, f"a whole number >= {lowest}", value, name)
        return int(value)

    def flag(self, option: str, value: Any, name: str) -> None:
        """Check that a value is True or False."""
        self.require(isinstance(value, bool), option, "True or False", value, name)

    def text(self, option: str, value: Any, name: str) -> str:
        """Check that a value is a non-empty string."""
        holds = isinstance(value, str) and bool(value)
        self.require(holds, option, "a non-empty string", value, name)
        return str(value)

    def function(self, option: str, value: Any, name: str) -> Callable[..., Any]:
        """Return a function, importing it if a config file names it as `"package.module:attr"`."""
        resolved = lookup(value) if isinstance(value, str) and ":" in value else value
        rule = "a function, or 'package.module:attr' that names one"
        self.require(callable(resolved), option, rule, value, name)
        return resolved  # type: ignore[no-any-return]  # callable
