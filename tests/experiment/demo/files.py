"""The files of the demo."""

from __future__ import annotations

import json
from pathlib import Path

from steelyard.experiment import demo

FOLDER = Path(demo.__file__).parent


def read(name: str) -> list[dict[str, str]]:
    """Lines of one of its data files."""
    text = (FOLDER / f"{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]
