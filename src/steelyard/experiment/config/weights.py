"""Weights, bounds and learning rates in config files: numbers, schedules, or ranges to tune."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import AfterValidator, WithJsonSchema

from steelyard.errors import ConfigError, SpecError
from steelyard.spec import schedules
from steelyard.spec.checks import is_finite
from steelyard.spec.protocol import Schedule

if TYPE_CHECKING:
    from steelyard.experiment.config.schema import Config

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


def check_config_weight(value: Any) -> Any:
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
    """Check that `value` is a number >= 0, a schedule or None, and return it.

    Raises:
        ValueError: it is none of these; the message is the rule.
    """
    return None if value is None else _check_number(value, _RATE)


_SCHEDULE_SCHEMA = {
    "anyOf": [
        {"type": "object", "properties": {kind: {}}, "required": [kind]} for kind in SCHEDULES
    ]
}
_NUMBER_SCHEMA = {"type": "number", "minimum": 0}
_RANGE_SCHEMA = {
    "type": "object",
    "properties": {
        "tune": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "log": {"type": "boolean"},
    },
    "required": ["tune"],
}

_BOUND_SCHEMA = {
    "anyOf": [
        {"type": "object", "properties": {kind: {}, "scale": {}}, "required": [kind]}
        for kind in ("at_most", "at_least")
    ]
}

# `Any`: each check takes any value, and its error states the whole rule.
Weight: TypeAlias = Annotated[
    Any,
    AfterValidator(check_config_weight),
    WithJsonSchema({"anyOf": [_NUMBER_SCHEMA, _SCHEDULE_SCHEMA, _RANGE_SCHEMA, _BOUND_SCHEMA]}),
]
RewardWeight: TypeAlias = Annotated[
    Any,
    AfterValidator(check_scalar_weight),
    WithJsonSchema({"anyOf": [_NUMBER_SCHEMA, _SCHEDULE_SCHEMA, _RANGE_SCHEMA]}),
]
Rate: TypeAlias = Annotated[
    Any,
    AfterValidator(check_rate),
    WithJsonSchema({"anyOf": [_NUMBER_SCHEMA, _SCHEDULE_SCHEMA, {"type": "null"}]}),
]


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
    return {key: value if key in _BOUNDS else entry for key, entry in weight.items()}


def weight_fields(weight: Any) -> dict[str, Any]:
    """Convert a weight or a bound to fields of a `RegularizerSpec`.

    Raises:
        ValueError: it is none; the message is the rule.
    """
    if not _is_bound(weight):
        return {"weight": schedule_of(weight)}
    return {key: schedule_of(entry) if key in _BOUNDS else entry for key, entry in weight.items()}


def weight_ranges(config: Config) -> dict[str, Mapping[str, Any]]:
    """Ranges of weights and bounds to tune, by the term's name; `<use>#<number>` without one.

    That of a reward has the name `rewards.<name>`, as in an override.

    Raises:
        ConfigError: two of them have the same name.
    """
    ranges: dict[str, Mapping[str, Any]] = {}
    names = []
    tables: dict[str, Sequence[Any]] = {"": config.regularizers, "rewards.": config.rewards}
    for prefix, entries in tables.items():
        for number, entry in enumerate(entries, 1):
            if (span := range_of(entry.weight)) is not None:
                names.append(f"{prefix}{entry.name or f'{entry.use}#{number}'}")
                ranges[names[-1]] = span
    if len(ranges) < len(names):
        raise ConfigError(f"names of terms with a range to tune must be unique, got {names}")
    return ranges


def with_weights(config: Config, weights: Mapping[str, float]) -> Config:
    """Copy of the config with these weights in place of the ranges, in their order."""
    remaining = iter(weights.values())
    tables = {
        table: [
            entry
            if range_of(entry.weight) is None
            else entry.model_copy(update={"weight": with_value(entry.weight, next(remaining))})
            for entry in getattr(config, table)
        ]
        for table in ("regularizers", "rewards")
    }
    return config.model_copy(update=tables)


def schedule_of(value: Any, forms: str = _RATE) -> float | Schedule:
    """Convert a number or schedule of a config file to a float or a function of the step.

    Args:
        value: the number or schedule.
        forms: what the key takes, for the message.

    Raises:
        ValueError: `value` is no known schedule; the message is the rule.
    """
    if not isinstance(value, Mapping):
        return float(value)
    if len(value) != 1 or not value.keys() <= SCHEDULES.keys():
        raise ValueError(f"must be {forms}; schedules: {', '.join(SCHEDULES)}")
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
        schedule_of(value, forms)
        return value
    if not is_finite(value):
        raise ValueError(f"must be {forms}")
    if value < 0:
        raise ValueError("must be >= 0")
    return value


def _is_bound(value: Any) -> bool:
    return isinstance(value, Mapping) and any(key in value for key in _BOUNDS)


def _check_bound(value: Mapping[str, Any]) -> Mapping[str, Any]:
    limits = [limit for key, limit in value.items() if key in _BOUNDS]
    scale = value.get("scale", 1.0)
    valid = len(limits) == 1 and value.keys() <= {*_BOUNDS, "scale"}
    if not valid or not is_finite(scale) or scale <= 0:
        raise ValueError(f"must be {_BOUND}")
    (limit,) = limits
    if is_range(limit):
        _check_range(limit)
    elif isinstance(limit, Mapping):
        schedule_of(limit, _BOUND)
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
