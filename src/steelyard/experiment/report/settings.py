"""Resolved configs: one setting as text, and what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from steelyard.experiment.report.folders import Run


def setting(value: Any) -> str:
    """A setting as one line of text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings in which runs differ, with each run's own: "–" where it has none."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    values = {key: [each.get(key, "–") for each in flat] for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        # Regularizers: by name, so that one that is left out does not shift the others.
        value = {str(each.get("name", index)): each for index, each in enumerate(value)}
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key))
    else:
        yield path, setting(value)
