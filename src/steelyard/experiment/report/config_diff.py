"""Resolved configs: one setting as text, and the settings that differ between runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steelyard.experiment.report.load import LoadedRun, configured_terms, term_name

_NAMED = ("regularizers", "rewards")  # lists of tables with names


def format_setting(value: Any) -> str:
    """Text of a setting, in one line: strings as they are, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def top_level_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are in no table of the config; tables that were not given are left out."""
    return {
        key: value
        for key, value in config.items()
        if not isinstance(value, Mapping) and key not in _NAMED and value is not None
    }


def config_differences(runs: Sequence[LoadedRun]) -> dict[str, list[str]]:
    """Settings in which runs differ: one value per run, "–" where the run has none.

    A regularizer or reward that only some runs have is one row, "enabled" or "–"; its options are
    not compared.
    """
    configs = [dict(run.config) for run in runs]
    for table in _NAMED:
        configs = _with_named_terms(configs, table)
    flat = [dict(_flatten(config)) for config in configs]
    keys = dict.fromkeys(key for each in flat for key in each)
    values = {key: [each.get(key, "–") for each in flat] for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def _with_named_terms(configs: Sequence[Mapping[str, Any]], table: str) -> list[dict[str, Any]]:
    """Return the configs with the enabled entries of a list as a mapping by name.

    Those that not every run has get the value "enabled" instead of their options.
    """
    enabled = [
        {
            term_name(term): term
            for term in configured_terms(config, table)
            if term.get("enabled", True)
        }
        for config in configs
    ]
    shared = set.intersection(*(set(each) for each in enabled))
    return [
        {
            **config,
            table: {name: term if name in shared else "enabled" for name, term in each.items()},
        }
        for config, each in zip(configs, enabled, strict=True)
    ]


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each leaf of nested mappings with its dotted path, such as `train.steps`."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, format_setting(value)
