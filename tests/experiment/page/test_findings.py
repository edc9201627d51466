"""Findings of a run on the page, while its metrics grow."""

from __future__ import annotations

import json
from pathlib import Path

from steelyard.doctor import Finding
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.page.run_views import FindingsReader, RunViews
from steelyard.experiment.run.health import examine
from tests.experiment.folders import write_lines
from tests.experiment.run.test_health import rows_of, write


def rules(findings: list[Finding]) -> list[tuple[str, int, int | None]]:
    return [(finding.rule, finding.step, finding.ended) for finding in findings]


def grow(run: Path, *held_out: float) -> None:
    write_lines(run / "metrics.jsonl", rows_of(*held_out))


def test_findings_follow_the_metrics_and_begin_again_when_they_are_cut(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, rows_of(2.0, 1.9))
    reader = FindingsReader(run)
    assert reader.read() == []
    grow(run, 2.0, 1.9, 3.0)
    assert rules(reader.read()) == [("worse than untrained", 2, None)]
    grow(run, 2.0, 1.9, 3.0, 1.8)
    assert rules(reader.read()) == [("worse than untrained", 2, 3)]
    grow(run, 2.0, 1.5, 1.4, 1.3, 1.2)
    assert reader.read() == []
    assert reader.read() == [], "nothing new"


def test_of_a_step_that_is_there_twice_the_last_row_counts(tmp_path: Path) -> None:
    """As where a trainer adds the values of an evaluation to the step before it."""
    run = tmp_path / "run"
    plain = [{"step": step, "base_loss/value": 2.0} for step in range(3)]
    held_out = zip(plain, (2.0, 4.0, 1.5), strict=True)
    evaluated = [{**row, "held_out/loss": loss} for row, loss in held_out]
    rows = [row for pair in zip(plain, evaluated, strict=True) for row in pair]
    write(run, rows[:3])
    reader = FindingsReader(run)
    assert reader.read() == []
    write_lines(run / "metrics.jsonl", rows[:4])
    assert rules(reader.read()) == [("worse than untrained", 1, None)]
    write_lines(run / "metrics.jsonl", rows)
    assert rules(reader.read()) == [("worse than untrained", 1, 2)]
    assert set(reader.read()) == set(FindingsReader(run).read()) == set(examine(run)[0].findings)


def test_a_failed_step_is_among_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, rows_of(2.0, 3.0))
    failure = {"step": 2, "failed": "TermError", "failed/reason": "away", "failed/term": "kl"}
    (run / "failure.json").write_text(json.dumps(failure))
    found = FindingsReader(run).read()
    assert rules(found) == [("failed", 2, None), ("worse than untrained", 1, None)]
    assert set(found) == set(examine(run)[0].findings)
    (run / "failure.json").write_text("damaged")
    assert rules(FindingsReader(run).read()) == [("worse than untrained", 1, None)]


def test_the_page_gets_them_as_json(tmp_path: Path) -> None:
    write(tmp_path / "run", rows_of(2.0, 3.0))
    views = RunViews(RunIndex(tmp_path))
    found = views.findings("run")
    assert json.loads(json.dumps(found))["records"][0]["cure"].startswith("divide the learning")
    assert views.findings("run") == found
