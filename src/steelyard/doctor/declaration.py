"""Declare terms in the form of a config, so that `Facts.of_config` reads of them what it can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steelyard.doctor.facts import innermost, kind_of, path_of, wrapped
from steelyard.spec.regularizer import RegularizerSpec

_SCHEDULES = "steelyard.spec.schedules"
_PLAIN = (bool, int, float, str)


def declared_terms(specs: Iterable[RegularizerSpec]) -> list[dict[str, Any]]:
    """Entries of `[[regularizers]]` for these specs, as JSON can hold them.

    Example:
        >>> spec = RegularizerSpec(lambda data, logprobs: 0.0, at_most=0.3, name="kl")
        >>> declared_terms([spec])[0]["weight"]
        {'at_most': 0.3}
    """
    return [_declared_term(spec) for spec in specs]


def _declared_term(spec: RegularizerSpec) -> dict[str, Any]:
    fn = innermost(spec.fn)
    inner = wrapped(fn)
    options = {**_plain(spec.options), **_options_of(fn if inner is None else inner)}
    if inner is not None:
        options = {"regularizer": {"fn": path_of(inner), "options": options}}
    return {
        "use": kind_of(fn) or path_of(fn),
        "name": spec.name,
        "weight": _declared_weight(spec),
        "options": options,
        "every": spec.every,
        "gradient": spec.gradient,
        "run_in": spec.run_in,
        "needs": list(spec.needs),
        "anchor": spec.anchor,
        "enabled": spec.enabled,
        **({} if spec.data is None else _declared_data(spec.data, spec.per_step)),
    }


def _declared_data(data: Sequence[Any], per_step: int) -> dict[str, Any]:
    return {"data": {"count": len(data)}, "per_step": per_step}


def _declared_weight(spec: RegularizerSpec) -> Any:
    if not spec.is_bounded:
        return _declared_number(spec.weight)
    side = "at_most" if spec.at_most is not None else "at_least"
    bound = {side: _declared_number(getattr(spec, side))}
    return bound if spec.scale is None else {**bound, "scale": spec.scale}


def _declared_number(value: Any) -> Any:
    """A number as it is, a schedule as a table."""
    if not callable(value):
        return value
    kind = type(value)
    if kind.__module__ == _SCHEDULES:
        values = list(vars(value).values())  # a frozen dataclass
        if all(isinstance(v, int | float) for v in values):
            return {kind.__name__.removeprefix("_").lower(): values}
    return {"schedule": path_of(value)}


def _options_of(fn: Any) -> dict[str, Any]:
    """Options of a ready-made regularizer that say what its value is."""
    own = {name: getattr(fn, name, None) for name in ("reduction", "kind", "reference")}
    return {name: value for name, value in own.items() if isinstance(value, str)}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if isinstance(value, _PLAIN)}
