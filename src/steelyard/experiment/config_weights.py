"""Weights, bounds and learning rates in config files: numbers, schedules, or ranges to tune."""

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
MAX_CHECKED_STEPS = 10_000  # of a schedule, before training
_SCHEDULE = "a schedule such as { warmup = [0.1, 10] }"
_RATE = f"a number >= 0 or {_SCHEDULE}"
_SCALAR_WEIGHT = f"a number >= 0, {_SCHEDULE}, or {{ tune = [low, high] }}"
_WEIGHT = (
    f"a number >= 0, {_SCHEDULE}, {{ tune = [low, high] }}, or a bound such as {{ at_most = 0.1 }}"
)
_BOUNDS = ("at_most", "at_least")
_BOUND = (
    "{ at_most = b } or { at_least = b }, with scale = s where b is 0; b is a number, a schedule "
    "or { tune = [low, high] }"
)
_RANGE = "{ tune = [low, high], log = true } with 0 <= low < high, and low > 0 where log is true"


def check_weight(value: Any) -> Any:
    """Check that `value` is a number >= 0, a schedule, a range to tune or a bound, and return it.

    Raises:
        ValueError: it is none of these; the message is the rule.
    """
    if _is_bound(value):
        return _check_bound(value)
    return _check_range(value) if is_range(value) else _check_number(value, _WEIGHT)


def check_scalar_weight(value: Any) -> Any:
    """Check that `value` is a number >= 0, a schedule or a range to tune, and return it.

    Raises:
        ValueError: it is none of these; the message is the rule.
    """
    return _check_range(value) if is_range(value) else _check_number(value, _SCALAR_WEIGHT)


def check_rate(value: Any) -> Any:
    """Check that `value` is a number >= 0 or a schedule, and return it.

    Raises:
        ValueError: it is neither; the message is the rule.
    """
    return _check_number(value, _RATE)


def is_range(value: Any) -> bool:
    """Return whether a weight is a range to tune, `{ tune = [low, high] }`."""
    return isinstance(value, Mapping) and "tune" in value


def range_of(weight: Any) -> Mapping[str, Any] | None:
    """Range to tune of a weight or of a bound; None if it is none."""
    if _is_bound(weight):
        weight = next(weight[key] for key in _BOUNDS if key in weight)
    return weight if is_range(weight) else None


def with_value(weight: Any, value: float) -> Any:
    """Weight or bound with a value in place of its range."""
    if not _is_bound(weight):
        return value
    return {key: value if key in _BOUNDS else each for key, each in weight.items()}


def fields_of(weight: Any) -> dict[str, Any]:
    """Convert a weight or a bound to fields of a `RegularizerSpec`.

    Raises:
        ValueError: it is none; the message is the rule.
    """
    if not _is_bound(weight):
        return {"weight": schedule_of(weight)}
    return {key: schedule_of(each) if key in _BOUNDS else each for key, each in weight.items()}


def schedule_of(value: Any) -> float | Schedule:
    """Convert a number or schedule of a config file to a float or a function of the step.

    Raises:
        ValueError: `value` is no known schedule; the message is the rule.
    """
    if not isinstance(value, Mapping):
        return float(value)
    _check_kind(value, _RATE)
    ((kind, arguments),) = value.items()
    rule = f"must be {{ {kind} = {SCHEDULES[kind]} }}"
    try:
        if kind == "piecewise":
            schedule: Schedule = schedules.piecewise({int(s): v for s, v in arguments.items()})
        else:
            schedule = getattr(schedules, kind)(*arguments)
    except (AttributeError, TypeError, ValueError) as error:
        reason = f" ({error})" if isinstance(error, SpecError) else ""
        raise ValueError(f"{rule}{reason}") from error
    return schedule


def _check_number(value: Any, forms: str) -> Any:
    """Check that `value` is a number >= 0 or a schedule; `forms` are those of the key."""
    if isinstance(value, Mapping):
        _check_kind(value, forms)
        schedule_of(value)
        return value
    if not is_finite(value):
        raise ValueError(f"must be {forms}")
    if value < 0:
        raise ValueError("must be >= 0")
    return value


def _check_kind(value: Mapping[str, Any], forms: str) -> None:
    if len(value) != 1 or not value.keys() <= SCHEDULES.keys():
        raise ValueError(f"must be {forms}; schedules: {', '.join(SCHEDULES)}")


def _is_bound(value: Any) -> bool:
    return isinstance(value, Mapping) and any(key in value for key in _BOUNDS)


def _check_bound(value: Mapping[str, Any]) -> Mapping[str, Any]:
    limits = [each for key, each in value.items() if key in _BOUNDS]
    scale = value.get("scale", 1.0)
    valid = len(limits) == 1 and value.keys() <= {*_BOUNDS, "scale"}
    if not valid or not is_finite(scale) or scale <= 0:
        raise ValueError(f"must be {_BOUND}")
    (limit,) = limits
    if is_range(limit):
        _check_range(limit)
    elif isinstance(limit, Mapping):
        _check_kind(limit, _BOUND)
        schedule_of(limit)
    elif not is_finite(limit) or (limit == 0 and "scale" not in value):
        raise ValueError(f"must be {_BOUND}")
    return value


def _check_range(value: Mapping[str, Any]) -> Mapping[str, Any]:
    span, log = value["tune"], value.get("log", False)
    valid = (
        value.keys() <= {"tune", "log"}
        and isinstance(log, bool)
        and isinstance(span, list)
        and len(span) == 2  # noqa: PLR2004 - low and high
        and all(is_finite(end) for end in span)
        and 0 <= span[0] < span[1]
        and (span[0] > 0 or not log)
    )
    if not valid:
        raise ValueError(f"must be {_RANGE}")
    return value
