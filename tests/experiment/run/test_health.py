"""Findings about runs on record: of one folder or several, of old, damaged and growing runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import RunError
from steelyard.experiment.run.health import examine
from tests.experiment.folders import write_ablation, write_lines, write_run

CONFIG = {"loss": {"use": "cross_entropy", "reduction": "mean"}, "train": {"learning_rate": 0.01}}


def write(folder: Path, rows: list[dict[str, Any]], config: object = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def rows_of(*held_out: float) -> list[dict[str, Any]]:
    return [{"step": step, "held_out/loss": loss} for step, loss in enumerate(held_out)]


def test_findings_of_a_run_begin_and_end(tmp_path: Path) -> None:
    (health,) = examine(write(tmp_path / "run", rows_of(2.0, 2.5, 1.9)))
    assert (health.steps, health.has_problem) == (3, False)
    assert [(f.rule, f.step, f.ended) for f in health.findings] == [("worse than untrained", 1, 2)]


def test_a_problem_that_lasts_is_one(tmp_path: Path) -> None:
    (health,) = examine(write(tmp_path / "run", rows_of(2.0, 1.9, 2.5)))
    assert health.has_problem
    assert health.to_dict()["run"] == str(tmp_path / "run")
    assert json.loads(json.dumps(health.to_dict()))["findings"][0]["severity"] == "problem"


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", rows_of(2.0, 1.9))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "held_out/loss": 9.0, "a": "\xc3')
    (health,) = examine(folder)
    assert (health.steps, health.findings) == (2, ())


def test_a_step_that_was_repeated_counts_once(tmp_path: Path) -> None:
    rows = [*rows_of(2.0, 9.0), {"step": 1, "held_out/loss": 1.9}]
    (health,) = examine(write(tmp_path / "run", rows))
    assert (health.steps, health.findings) == (2, ())


@pytest.mark.parametrize("config", [{}, {"loss": 3, "regularizers": [None, {"use": 4}]}])
def test_a_config_of_another_version_makes_rules_silent(tmp_path: Path, config: object) -> None:
    (health,) = examine(write(tmp_path / "run", [{"step": 0}, {"step": 1}], config))
    assert (health.steps, health.findings) == (2, ())


def test_a_run_without_metrics_has_no_steps(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink()
    assert [health.steps for health in examine(folder)] == [0]


def test_a_folder_of_runs_gives_each_of_them(tmp_path: Path) -> None:
    write_ablation(tmp_path / "ablation", seeds=2)
    write_run(tmp_path / "other", steps=2)
    names = [health.folder.relative_to(tmp_path).as_posix() for health in examine(tmp_path)]
    assert {"ablation/all", "ablation/none", "ablation/seed-1/all", "other"} <= set(names)
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("name", "reason"), [("empty", "empty has no run"), ("nowhere", "nowhere is no folder")]
)
def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=f"{reason}: a run has config.json and metrics.jsonl"):
        examine(tmp_path / name)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('{"step": 0}\nnonsense\n', "line 2, must be JSON"),
        ('{"step": 0}\n{"loss": 1}\n', "line 2, must have a whole number as 'step'"),
        ('{"step": true}\n', "line 1, must have a whole number as 'step'"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, lines: str, reason: str) -> None:
    folder = write(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(RunError, match=reason):
        examine(folder)
