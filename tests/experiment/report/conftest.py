"""One run with four terms and its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment.report import write_report
from tests.experiment.folders import write_run


@dataclass(frozen=True)
class Report:
    """A written report and the metrics that it shows."""

    page: Path
    rows: list[dict[str, Any]]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    rows = write_run(tmp_path / "one")
    return Report(write_report([tmp_path / "one"], tmp_path / "one.html"), rows)
