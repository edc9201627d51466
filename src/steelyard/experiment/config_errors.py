"""Format validation errors of a config: location, key, rule, value."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from steelyard.experiment.config import Config
from steelyard.experiment.secrets import redact
from steelyard.spec import shorten

_RULES = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a table",
    "string_too_short": "a non-empty string",
    "string_type": "a string",
}
_LIMITS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}
_MAX_SHOWN = 80  # characters of a value


def format_errors(error: ValidationError) -> str:
    """Format one line per error, such as `[[regularizers]] #2: weight must be >= 0, got -1`."""
    return "\n".join(_format_error(each) for each in error.errors())  # type: ignore[arg-type]  # a dict


def format_location(loc: Sequence[str | int]) -> str:
    """Format the location of a key as in TOML: `[train]: steps`, `[[regularizers]] #2: weight`.

    Example:
        >>> format_location(("regularizers", 1, "weight"))
        '[[regularizers]] #2: weight'
    """
    match list(loc):
        case [str(table), int(index), *keys]:
            head = f"[[{table}]] #{index + 1}"
        case [str(table), str(first), *rest]:
            head, keys = f"[{table}]", [first, *rest]
        case [key]:
            return f"[{key}]" if _is_table(str(key)) else str(key)
        case _:
            return "the config"
    return f"{head}: {'.'.join(str(key) for key in keys)}" if keys else head


def _format_error(details: dict[str, Any]) -> str:
    kind, loc, context = details["type"], details["loc"], details.get("ctx", {})
    location = format_location(loc)
    if kind == "missing":
        return f"{location} must be given, got nothing"
    if kind == "invalid_key":  # of YAML, which reads 1 as a number and yes as true
        return f"a key must be a string, got {details['input']!r}: write it in quotes"
    if kind == "extra_forbidden":  # its value is not shown: it may be a secret
        known = _keys_at(loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{location} is not a key; known: {', '.join(known)}{hint}"
    if kind == "value_error":
        rule = str(context["error"])
        if len(loc) <= 1 and _is_table(str(*loc)):  # a rule of a table names the values itself
            return rule if rule.startswith("[") else f"{location} {rule}"
    elif kind in _LIMITS:
        name, sign = _LIMITS[kind]
        rule = f"must be {sign} {context[name]:g}"
    elif kind == "literal_error":
        rule = f"must be one of {context['expected']}"
    else:
        rule = f"must be {_RULES.get(kind, details['msg'])}"
    return f"{location} {rule}, got {_shown(loc[-1] if loc else '', details['input'])}"


def _shown(key: str | int, value: Any) -> str:
    # Redacted before it is cut, which could split a secret.
    return shorten(repr(redact({key: value})[key]), _MAX_SHOWN)


def _is_table(key: str) -> bool:
    field = Config.model_fields.get(key)
    return field is None or _model_in(field.annotation) is not None


def _keys_at(loc: Sequence[str | int]) -> list[str]:
    model: type[BaseModel] = Config
    for key in loc:
        if isinstance(key, str):
            model = _model_in(model.model_fields[key].annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    # The annotation itself, the model of a list, or that of a union with None.
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each))), None)
