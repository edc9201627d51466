"""Base class of the tables of a config, and the types of their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, WithJsonSchema

from steelyard.experiment.config_secrets import REFERENCE, check_references
from steelyard.experiment.config_weights import (
    SCHEDULES,
    check_rate,
    check_scalar_weight,
    check_weight,
)
from steelyard.experiment.secrets import redact
from steelyard.spec import is_finite

_SCHEDULE = {
    "anyOf": [
        {"type": "object", "properties": {kind: {}}, "required": [kind]} for kind in SCHEDULES
    ]
}
_NUMBER = {"type": "number", "minimum": 0}
_RANGE = {
    "type": "object",
    "properties": {
        "tune": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "log": {"type": "boolean"},
    },
    "required": ["tune"],
}

_BOUND = {
    "anyOf": [
        {"type": "object", "properties": {kind: {}, "scale": {}}, "required": [kind]}
        for kind in ("at_most", "at_least")
    ]
}


def _check_held_out(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if not is_finite(value) or not 0 <= value < 1:
        raise ValueError("must be a fraction in [0, 1) or the path of a file")
    return value


def _check_objective(value: Any) -> Any:
    is_key = isinstance(value, str) and value
    is_sum = isinstance(value, dict) and value and all(is_finite(w) for w in value.values())
    if not is_key and not is_sum:
        raise ValueError("must be the key of a metric, or a table of keys and their weights")
    return value


def _check_aggregate(value: Any) -> Any:
    name = value.get("use") if isinstance(value, dict) else value
    if not isinstance(name, str) or not name:
        raise ValueError(
            "must be 'sum', the name of a TorchJD weighting such as 'upgrad', or a table with it "
            "as use, and its options"
        )
    return value


# `Any`: each check takes any value, and its error states the whole rule.
Weight: TypeAlias = Annotated[
    Any,
    AfterValidator(check_weight),
    WithJsonSchema({"anyOf": [_NUMBER, _SCHEDULE, _RANGE, _BOUND]}),
]
RewardWeight: TypeAlias = Annotated[
    Any,
    AfterValidator(check_scalar_weight),
    WithJsonSchema({"anyOf": [_NUMBER, _SCHEDULE, _RANGE]}),
]
Rate: TypeAlias = Annotated[
    Any, AfterValidator(check_rate), WithJsonSchema({"anyOf": [_NUMBER, _SCHEDULE]})
]
HeldOut: TypeAlias = Annotated[
    Any,
    AfterValidator(_check_held_out),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "string"}]}
    ),
]
Objective: TypeAlias = Annotated[
    Any,
    AfterValidator(_check_objective),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
Aggregate: TypeAlias = Annotated[
    Any,
    AfterValidator(_check_aggregate),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "properties": {"use": {"type": "string"}}, "required": ["use"]},
            ]
        }
    ),
]
Options: TypeAlias = Annotated[
    dict[str, Any],
    AfterValidator(check_references),
    WithJsonSchema({"type": "object", "additionalProperties": {"anyOf": [REFERENCE, {}]}}),
]
REFERENCE_FORMS = 'a secret is { env = "NAME" } or { file = "PATH" }'


class Table(BaseModel):
    """Base of the tables of a config: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # it may hold secrets
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, value if isinstance(value, BaseModel) else redact({name: value})[name]
