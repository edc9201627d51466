"""The examples for a plain PyTorch loop, run as scripts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of each line that the example prints."""
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return [line.replace("|", " ").split() for line in capsys.readouterr().out.splitlines()]


def test_pytorch_loop(capsys: pytest.CaptureFixture[str]) -> None:
    _, *rows = printed("pytorch_loop.py", capsys)
    assert [int(row[0]) for row in rows] == [0, 20, 40, 60]
    numbers = [[float(word) for word in row[1:]] for row in rows]
    for total, base, *terms in numbers:
        contributions, grad_norms = terms[::2], terms[1::2]
        assert total == pytest.approx(base + sum(contributions), abs=3e-3)
        assert all(norm > 0 for norm in grad_norms)
    assert numbers[-1][1] < 0.5 * numbers[0][1]  # it learns
    assert numbers[0][2] == 0.0  # the schedule starts there
    assert numbers[-1][2] < 0.0  # confidence is minus an entropy


def test_activity_regularization(capsys: pytest.CaptureFixture[str]) -> None:
    _, *rows = printed("activity_regularization.py", capsys)
    without, regularized = ([float(word.rstrip("%")) for word in row] for row in rows)
    assert without[0] == 0.0 < regularized[0]
    assert regularized[2] > without[2] + 5  # more silent units in both layers
    assert regularized[3] > without[3] + 5
    assert regularized[1] < 0.01  # and it fits
