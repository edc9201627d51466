"""Resolved configs: one setting as text, and the settings that differ between runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steelyard.experiment.report.load import LoadedRun, configured_terms, term_name


def format_setting(value: Any) -> str:
    """Text of a setting, in one line: strings as they are, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def top_level_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are in no table of the config."""
    return {
        key: value
        for key, value in config.items()
        if not isinstance(value, Mapping) and key != "regularizers"
    }


def config_differences(runs: Sequence[LoadedRun]) -> dict[str, list[str]]:
    """Settings in which runs differ: one value per run, "–" where the run has none.

    A regularizer that only some runs have is one row, "enabled" or "–"; its options are not
    compared.
    """
    terms = [_enabled_terms(run.config) for run in runs]
    partial = {name for each in terms for name in each if not all(name in other for other in terms)}
    flat = [dict(_flatten(_with_named_terms(run.config, partial))) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    values = {key: [each.get(key, "–") for each in flat] for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def _enabled_terms(config: Mapping[str, Any]) -> dict[str, Any]:
    return {term_name(term): term for term in configured_terms(config) if term.get("enabled", True)}


def _with_named_terms(config: Mapping[str, Any], partial: set[str]) -> dict[str, Any]:
    """Return the config with its enabled regularizers as a mapping by name.

    Names in `partial`, which not every run has, get the value "enabled" instead of their options.
    """
    terms = {
        name: "enabled" if name in partial else term
        for name, term in _enabled_terms(config).items()
    }
    return {**config, "regularizers": terms}


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each leaf of nested mappings with its dotted path, such as `train.steps`."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, format_setting(value)
