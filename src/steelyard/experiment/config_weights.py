"""Weights as config files write them: a number, a schedule, or a range to tune."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.errors import SpecError
from steelyard.spec import Schedule, is_finite, schedules

SCHEDULES = {
    "constant": "[v]",
    "cosine": "[start, end, steps]",
    "exponential": "[v, rate]",
    "linear": "[start, end, steps]",
    "piecewise": '{ "0" = v, "100" = w }',
    "warmup": "[v, steps]",
}
_FORMS = "a number >= 0, a schedule such as { warmup = [0.1, 10] }, or { tune = [low, high] }"
_TUNED = "{ tune = [low, high], log = true } with 0 <= low < high, and low > 0 where log is true"


def check_weight(value: Any) -> Any:
    """`value`, if it is a weight.

    Raises:
        ValueError: it is not; the message is the rule.
    """
    if is_tuned(value):
        return _check_tuned(value)
    return check_rate(value)


def check_rate(value: Any) -> Any:
    """`value`, if it is a number >= 0 or a schedule.

    Raises:
        ValueError: it is not; the message is the rule.
    """
    if isinstance(value, Mapping):
        schedule_of(value)
        return value
    if not is_finite(value):
        raise ValueError(f"must be {_FORMS}")
    if value < 0:
        raise ValueError("must be >= 0")
    return value


def is_tuned(value: Any) -> bool:
    """Whether a weight is a range to tune."""
    return isinstance(value, Mapping) and "tune" in value


def schedule_of(value: Any) -> float | Schedule:
    """What a spec takes for a weight, or a learning rate, of a config file.

    Raises:
        ValueError: it is none; the message is the rule.
    """
    if not isinstance(value, Mapping):
        return float(value)
    if len(value) != 1 or not value.keys() <= SCHEDULES.keys():
        raise ValueError(f"must be {_FORMS}; schedules: {', '.join(SCHEDULES)}")
    ((kind, given),) = value.items()
    rule = f"must be {{ {kind} = {SCHEDULES[kind]} }}"
    try:
        if kind == "piecewise":
            made: Schedule = schedules.piecewise({int(step): v for step, v in given.items()})
        else:
            made = getattr(schedules, kind)(*given)
    except (AttributeError, TypeError, ValueError) as error:
        why = f" ({error})" if isinstance(error, SpecError) else ""
        raise ValueError(f"{rule}{why}") from error
    return made


def _check_tuned(value: Mapping[str, Any]) -> Mapping[str, Any]:
    span, log = value["tune"], value.get("log", False)
    kept = (
        value.keys() <= {"tune", "log"}
        and isinstance(log, bool)
        and isinstance(span, list)
        and len(span) == 2  # noqa: PLR2004 - low and high
        and all(is_finite(end) for end in span)
        and 0 <= span[0] < span[1]
        and (span[0] > 0 or not log)
    )
    if not kept:
        raise ValueError(f"must be {_TUNED}")
    return value
