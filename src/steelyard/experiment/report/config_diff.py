"""Resolved configs: one setting as text, and what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steelyard.experiment.report.load import LoadedRun


def setting(value: Any) -> str:
    """A setting as one line of text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def others(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that stand in no table of the config."""
    return {
        key: value
        for key, value in config.items()
        if not isinstance(value, Mapping) and key != "regularizers"
    }


def differences(runs: Sequence[LoadedRun]) -> dict[str, list[str]]:
    """The settings in which runs differ, with each run's own: "–" where it has none."""
    held = [_terms(run.config) for run in runs]
    partial = {name for each in held for name in each if not all(name in other for other in held)}
    flat = [dict(_flat(_with_terms(run.config, partial))) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    values = {key: [each.get(key, "–") for each in flat] for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def _terms(config: Mapping[str, Any]) -> dict[str, Any]:
    """The regularizers that take part, by name."""
    given = config.get("regularizers")
    listed = given if isinstance(given, list) else []
    return {
        str(each.get("name") or each.get("use")): each
        for each in listed
        if isinstance(each, Mapping) and each.get("enabled", True)
    }


def _with_terms(config: Mapping[str, Any], partial: set[str]) -> dict[str, Any]:
    """The config with regularizers by name; one that not every run has is just there."""
    terms = {n: "there" if n in partial else each for n, each in _terms(config).items()}
    return {**config, "regularizers": terms}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, setting(value)
