"""The doctor goes along with a run: its findings are said once, and are those of its record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard.doctor import Finding
from steelyard.errors import TermError
from steelyard.experiment import Config, RunFolder, resume, train
from steelyard.experiment.page import write_report
from steelyard.experiment.run.health import examine
from tests.experiment.small_runs import (
    KL,
    L2,
    FailsLate,
    Recorder,
    failing,
    small_config,
    stop_after,
    term,
)


def ruined(folder: Path, *overrides: str) -> Config:
    """A run whose learning rate is far too large."""
    steps = ("train.steps=9", "train.evaluate_every=2", "train.learning_rate=0.5")
    return small_config(folder, *steps, *overrides, regularizers=[L2, KL])


def said(folder: Path) -> list[str]:
    """Lines of the log that are findings, without their time."""
    lines = (line[20:] for line in (folder / "log.txt").read_text().splitlines())
    return [line for line in lines if line.startswith(("problem: ", "warning: ", "information: "))]


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, Recorder]:
    """A ruined run that was not stopped, and what its watcher was told."""
    watch = Recorder()
    train(ruined(tmp_path), tmp_path / "whole", watch=watch)
    return tmp_path / "whole", watch


def test_a_run_says_what_is_wrong_with_it(whole: tuple[Path, Recorder]) -> None:
    folder, watch = whole
    worse = [finding for finding in watch.changed if finding.rule == "worse than untrained"]
    assert worse
    assert worse[0].step == 2
    assert watch.lasting
    assert said(folder) == [finding.line for finding in watch.changed]
    assert all(finding.ended is None for finding in watch.lasting)


def test_the_record_of_a_run_has_the_findings_that_it_said(whole: tuple[Path, Recorder]) -> None:
    folder, watch = whole
    (health,) = examine(folder)

    def beginnings(findings: list[Finding]) -> list[tuple[str, str, int]]:
        return sorted((f.rule, f.subject, f.step) for f in findings)

    begun = [finding for finding in watch.changed if finding.ended is None]
    assert beginnings(list(health.findings)) == beginnings(begun)
    assert {f for f in health.findings if f.ended is None} == set(watch.lasting)


def test_a_watcher_without_findings_gets_their_lines(tmp_path: Path) -> None:
    class Plain:
        def __init__(self) -> None:
            self.messages: list[str] = []

        def say(self, text: str) -> None:
            self.messages.append(text)

        def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
            pass

    watch = Plain()
    train(ruined(tmp_path), tmp_path / "run", watch=watch)
    lines = said(tmp_path / "run")
    assert lines
    assert [text for text in watch.messages if text in lines] == lines


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_resumed_run_says_nothing_twice(
    whole: tuple[Path, Recorder], tmp_path: Path, steps: int
) -> None:
    first, second = Recorder(), Recorder()
    train(ruined(tmp_path), tmp_path / "parts", watch=first, stop=stop_after(steps))
    resume(tmp_path / "parts", watch=second)
    assert [*first.changed, *second.changed] == whole[1].changed
    assert second.lasting == whole[1].lasting
    assert said(tmp_path / "parts") == said(whole[0])


def test_a_step_that_fails_is_a_finding(tmp_path: Path) -> None:
    config = small_config(tmp_path, "train.steps=5", regularizers=[L2, term(FailsLate)])
    watch = Recorder()
    with pytest.raises(TermError, match="FailsLate"):
        train(config, tmp_path / "r", watch=watch)
    (finding,) = [finding for finding in watch.changed if finding.rule == "failed"]
    assert (finding.subject, finding.severity, finding.step) == (
        "regularizers/FailsLate",
        "problem",
        3,
    )
    assert "the service is down" in finding.evidence
    assert said(tmp_path / "r")[-1] == finding.line
    (health,) = examine(tmp_path / "r")
    assert health.has_problem
    assert finding in health.findings
    assert len(RunFolder(tmp_path / "r").metrics()) == 3
    page = write_report([tmp_path / "r"], tmp_path / "r.html").read_text()
    assert "has failed, and the run has ended" in page


def test_a_run_that_goes_on_after_a_failure_is_well(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    entry = term(FailsLate, options={"unless": str(gate)})
    config = small_config(tmp_path, "train.steps=5", regularizers=[L2, entry])
    with pytest.raises(TermError):
        train(config, tmp_path / "r")
    gate.touch()
    assert resume(tmp_path / "r").status == "done"
    (health,) = examine(tmp_path / "r")
    assert [f for f in health.findings if f.rule == "failed"] == []
    assert (health.steps, RunFolder(tmp_path / "r").failure()) == (5, None)


def test_a_run_whose_first_step_fails_is_no_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, regularizers=[term(failing)])
    with pytest.raises(TermError):
        train(config, tmp_path / "r")
    assert not RunFolder(tmp_path / "r").holds_run
    assert RunFolder(tmp_path / "r").failure() is None
