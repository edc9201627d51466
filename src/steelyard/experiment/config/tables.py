"""Base class of the tables of a config file, and the types of keys that several tables have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from steelyard.experiment.config.secrets import REFERENCE, check_references
from steelyard.output.redaction import redact
from steelyard.spec.checks import is_finite


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


def _check_held_out(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if not is_finite(value) or not 0 <= value < 1:
        raise ValueError("must be a fraction in [0, 1) or the path of a file")
    return value


# `Any`: the check takes any value, and its error states the whole rule.
HeldOut: TypeAlias = Annotated[
    Any,
    AfterValidator(_check_held_out),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "string"}]}
    ),
]
REFERENCE_FORMS = 'a secret is { env = "NAME" } or { file = "PATH" }'
Options: TypeAlias = Annotated[
    dict[str, Any],
    AfterValidator(check_references),
    WithJsonSchema({"type": "object", "additionalProperties": {"anyOf": [REFERENCE, {}]}}),
    Field(description=f"arguments of its constructor, or of the function; {REFERENCE_FORMS}"),
]
Resources: TypeAlias = Annotated[
    Options,
    Field(
        description=f"of its tasks, with run_in = 'ray': num_cpus, num_gpus, custom resources, "
        f"runtime_env; {REFERENCE_FORMS}"
    ),
]
Chat: TypeAlias = Annotated[
    bool | None,
    Field(
        description="whether a line with 'prompt' is a chat with the model; None: if it has a chat "
        "template; false: raw text"
    ),
]
