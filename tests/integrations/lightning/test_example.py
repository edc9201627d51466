"""The Lightning example, run as a script."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_training.py"


def test_lightning_training(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    rows = [[float(cell) for cell in line.split()] for line in lines if line[4:5].isdigit()]
    composed, added = rows[:4], rows[4:]
    assert [row[:-1] for row in composed] == added
    for _, base, sparsity, _, diversity, weight, total, _ in composed:
        assert total == pytest.approx(base + 0.02 * sparsity + weight * diversity, abs=2e-3)
    assert composed[-1][1] < composed[0][1] / 2
    assert [row[5] for row in composed] == [0, 0.0067, 0.0133, 0.02]
    assert lines[-1] == "the same model, to the last bit: True"
