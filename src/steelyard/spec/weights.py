"""Validation of weights, for every kind of term: a finite number, or a schedule of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from steelyard.errors import InputError, SpecError
from steelyard.spec.messages import describe
from steelyard.spec.numbers import is_array, is_finite, is_traced


def check_weight(
    weight: object, name: str, where: str = "", *, negative: bool = False, kind: str = "penalty"
) -> float:
    """Check that a weight is a finite number, and >= 0 for a regularizer; returns a float.

    Args:
        weight: the weight.
        name: the name of the term.
        where: where the weight was found, for the message: `" at step 3"`.
        negative: whether it may be below 0, as in sums of penalties over arrays.
        kind: the word for such a term in messages.

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
            f"weight of {kind} {name!r} must be a finite number, got {weight!r}{where}."
        )
    raise SpecError(
        f"weight must be a finite number >= 0, got {weight!r}{where} (regularizer {name!r})."
    )


# `Any`: a step and a weight may be tracers of JAX or torch.
def weight_at(
    weight: float | Callable[[Any], Any],
    step: Any,
    name: str,
    *,
    negative: bool = False,
    kind: str = "penalty",
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
        found = weight(step)
    except Exception as error:
        title = f"{kind if negative else 'regularizer'} {name!r}"
        raise failure(_why_it_raised(weight, step, title, error)) from error
    if is_array(found):
        if tuple(found.shape):
            raise failure(
                f"the schedule of {name!r} must give one number, got shape {tuple(found.shape)}."
            )
        if is_traced(found):
            return found
        found = float(found)
    elif type(found).__name__ == "SymFloat":  # torch's, of a step that is a SymInt
        return found
    if _is_allowed(found, negative=negative):  # before a message, which Dynamo could not format
        return float(found)
    return check_weight(found, name, f" at step {step}", negative=negative, kind=kind)


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
