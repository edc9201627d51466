"""Validation of weights, for every kind of term, and of bounds: numbers, or schedules of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from steelyard.errors import InputError, SpecError
from steelyard.spec.checks import is_array, is_finite, is_traced
from steelyard.spec.error_messages import describe


def check_weight(
    weight: object, name: str, where: str = "", *, negative: bool = False, kind: str = ""
) -> float:
    """Check that a weight is a finite number, and >= 0 for a regularizer; returns a float.

    Args:
        weight: the weight.
        name: the name of the term.
        where: where the weight was found, for the message: `" at step 3"`.
        negative: whether it may be below 0, as in sums of penalties over arrays.
        kind: the word for such a term in messages; by default "penalty" if it may be below 0,
            else "regularizer".

    Raises:
        SpecError: it breaks the rule.
        InputError: likewise, for a term whose weight may be below 0.

    Example:
        >>> check_weight(1, "sparsity"), check_weight(-0.1, "l1", negative=True)
        (1.0, -0.1)
    """
    if _is_allowed(weight, negative=negative):
        return float(cast("float", weight))
    if negative:
        raise InputError(
            f"weight of {kind or 'penalty'} {name!r} must be a finite number, got "
            f"{weight!r}{where}."
        )
    raise SpecError(
        f"weight must be a finite number >= 0, got {weight!r}{where} "
        f"({kind or 'regularizer'} {name!r})."
    )


# `Any`: a step and a weight may be tracers of JAX or torch.
def weight_at(
    weight: float | Callable[[Any], Any],
    step: Any,
    name: str,
    *,
    negative: bool = False,
    kind: str = "",
) -> Any:
    """Weight of a term at `step`: the number itself, or the value of its schedule.

    A concrete weight is checked and returned as a float. A traced scalar, inside `jax.jit` or
    `torch.compile`, has no value to check, and is returned unchanged.

    Args:
        weight: a number, checked before, or a schedule `step -> weight`.
        step: the step, which may be traced.
        name: the name of the term.
        negative: as for `check_weight`.
        kind: as for `check_weight`.

    Raises:
        SpecError: the schedule raises, or does not return one valid weight.
        InputError: likewise, for a term whose weight may be below 0.

    Example:
        >>> weight_at(0.5, 3, "sparsity"), weight_at(lambda step: step / 10, 3, "sparsity")
        (0.5, 0.3)
    """
    if not callable(weight):
        return weight
    failure = InputError if negative else SpecError
    if step is None:
        raise failure(
            f"the weight of {name!r} follows a schedule and must have a step, got step=None: "
            "give step=."
        )
    try:
        value = weight(step)
    except Exception as error:
        title = f"{kind or ('penalty' if negative else 'regularizer')} {name!r}"
        raise failure(_why_it_raised(weight, step, title, error)) from error
    if is_array(value):
        if tuple(value.shape):
            raise failure(
                f"the schedule of {name!r} must give one number, got shape {tuple(value.shape)}."
            )
        if is_traced(value):
            return value
        value = float(value)
    elif type(value).__name__ == "SymFloat":  # torch's, of a step that is a SymInt
        return value
    if _is_allowed(value, negative=negative):  # before a message, which Dynamo could not format
        return float(value)
    return check_weight(value, name, f" at step {step}", negative=negative, kind=kind)


class Bound(NamedTuple):
    """Bound of a term's value at one step.

    Attributes:
        value: the bound.
        scale: what a violation is measured against.
        upper: True for `at_most`, False for `at_least`.
    """

    value: float
    scale: float
    upper: bool

    @property
    def sign(self) -> int:
        """Sign of the term in the loss: 1 for an upper bound, -1 for a lower one."""
        return 1 if self.upper else -1

    def error(self, value: float) -> float:
        """Distance of a value from the bound, in units of the scale; positive if violated."""
        return self.sign * (value - self.value) / self.scale


def check_bound(bound: object, name: str, where: str = "") -> float:
    """Check that a bound is a finite number; returns a float.

    Raises:
        SpecError: it is not.
    """
    if not is_finite(bound):
        raise SpecError(
            f"a bound must be a finite number, or a schedule of them, got {bound!r}{where} "
            f"(regularizer {name!r})."
        )
    return float(cast("float", bound))


def bound_at(bound: float | Callable[[int], Any], step: int, name: str) -> float:
    """Bound at `step`: the number itself, or the value of its schedule.

    Raises:
        SpecError: the schedule raises, or does not return a finite number.
    """
    if not callable(bound):
        return bound
    try:
        value = bound(step)
        if is_array(value) and not tuple(value.shape):  # a schedule of optax or torch
            value = float(value)
    except Exception as error:
        raise SpecError(
            f"a bound must be a schedule that gives a number for every step, and it raised "
            f"{describe(error)} at step {step} (regularizer {name!r})."
        ) from error
    return check_bound(value, name, f" at step {step}")


def check_scale(bound: float, scale: object, name: str) -> float:
    """Scale of a bound's violations: `scale`, or else the size of the bound.

    Raises:
        SpecError: `scale` is not a finite number > 0, or is missing where the bound is 0.
    """
    if scale is None and bound != 0:
        return abs(bound)
    if not is_finite(scale) or cast("float", scale) <= 0:
        need = "a bound of 0 needs a scale: " if scale is None else ""
        raise SpecError(
            f"{need}scale must be a finite number > 0, what a violation is measured against, "
            f"got {scale!r} (regularizer {name!r})."
        )
    return float(cast("float", scale))


def _is_allowed(weight: object, *, negative: bool) -> bool:
    return is_finite(weight) and (negative or cast("float", weight) >= 0)


def _why_it_raised(weight: object, step: Any, title: str, error: Exception) -> str:
    if is_array(step) and is_traced(step):
        return (
            f"the schedule of {title} must work on a traced step, and {weight!r} does not "
            f"({type(error).__name__}): take one of steelyard.schedules or of optax "
            "(linear_schedule, cosine_decay_schedule, …), or write it with jax.numpy."
        )
    return (
        f"weight must be a schedule that gives a number for every step, and it raised "
        f"{describe(error)} at step {step} ({title})."
    )
