"""Texts of a run for the page: samples, rollouts, drivers, log and config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard.experiment.driver_records import redact_pieces
from steelyard.experiment.secrets import redact
from steelyard.experiment.watch.plain_files import read_last_objects, read_tail
from steelyard.experiment.watch.run_index import is_number, read_config_file

_MAX_BYTES = 2**20  # of a file, from its end
_MAX_LOG = 2**16
_MAX_ROLLOUTS = 64


def samples(run: Path) -> dict[str, Any]:
    """Completions of the sample prompts."""
    found, whole = read_last_objects(run / "samples.jsonl", _MAX_BYTES)
    return {"records": redact(found), "whole": whole}


def rollouts(run: Path) -> dict[str, Any]:
    """The last answers with their rewards, the latest first."""
    found, whole = read_last_objects(run / "rollouts.jsonl", _MAX_BYTES)
    shown = found[-_MAX_ROLLOUTS:]
    return {"records": redact(shown[::-1]), "whole": whole and len(shown) == len(found)}


def drivers(run: Path) -> dict[str, Any]:
    """The examples that drive each term, at the last step that has records."""
    found, _ = read_last_objects(run / "drivers.jsonl", _MAX_BYTES)
    last = max((each["step"] for each in found if type(each.get("step")) is int), default=None)
    records = [each for each in found if last is not None and each.get("step") == last]
    return {"records": [_redact_driver(each) for each in records], "whole": len(records) > 0}


def log(run: Path) -> dict[str, Any]:
    """The end of the log."""
    tail, whole = read_tail(run / "log.txt", _MAX_LOG)
    text = tail.decode("utf-8", errors="replace")
    return {"text": redact(text if whole else text.partition("\n")[2]), "whole": whole}


def config(run: Path) -> dict[str, Any]:
    """The config."""
    return {"text": json.dumps(read_config_file(run), indent=2, ensure_ascii=False), "whole": True}


RECORDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "samples": samples,
    "rollouts": rollouts,
    "drivers": drivers,
    "log": log,
    "config": config,
}


def _redact_driver(record: dict[str, Any]) -> dict[str, Any]:
    # A secret may span several tokens.
    data = record.get("data")
    kept = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    return redact(record) | {
        "data": [{**each, "tokens": redact_pieces(_pieces(each.get("tokens")))} for each in kept]
    }


def _pieces(tokens: Any) -> list[tuple[str, float | None]]:
    pairs = tokens if isinstance(tokens, list) else []
    return [
        (str(pair[0]), pair[1] if is_number(pair[1]) else None)
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2  # noqa: PLR2004 - a text and its share
    ]
