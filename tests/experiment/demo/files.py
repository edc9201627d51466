"""The data files of the demo."""

from __future__ import annotations

import json
from pathlib import Path

from steelyard.experiment import demo

FOLDER = Path(demo.__file__).parent
DATA, HELD_OUT = (
    [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]
    for name in ("data.jsonl", "held_out.jsonl")
)
