"""`steelyard report` and `steelyard demo`, as commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Kitchen
from tests.experiment.folders import write_ablation, write_run


def test_a_report_is_written_into_the_run(kitchen: Kitchen, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    done = kitchen.run("report", "run", cwd=tmp_path)
    assert (done.code, done.out) == (0, "Report: run/report.html\n")
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_report_of_several_runs_is_written_here_or_where_it_is_asked_for(
    kitchen: Kitchen, tmp_path: Path
) -> None:
    write_run(tmp_path / "a", steps=2)
    write_ablation(tmp_path / "b")
    done = kitchen.run("report", "a", "b", cwd=tmp_path)
    assert (done.code, done.out) == (0, "Report: report.html\n")
    done = kitchen.run("report", "b", "-o", "pages/b.html", cwd=tmp_path)
    assert (done.code, done.out) == (0, "Report: pages/b.html\n")


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["report"], 2, "Missing argument 'RUN...'"),
        (["report", "nowhere"], 1, "RunError: nowhere is no folder"),
    ],
)
def test_a_wrong_use_has_an_exit_code_and_a_reason(
    kitchen: Kitchen, words: list[str], code: int, reason: str, tmp_path: Path
) -> None:
    done = kitchen.run(*words, cwd=tmp_path)
    assert done.code == code
    assert reason in done.err


def test_the_demo_ends_with_a_summary_samples_and_the_report(
    kitchen: Kitchen, tmp_path: Path
) -> None:
    tiny = ["model.base_model=tiny-random", "data.max_length=256", "train.sample_tokens=4"]
    done = kitchen.run("demo", *tiny, "train.steps=2", "--run", "demo", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "\n2 steps in " in done.out
    assert "On held-out data the loss went from " in done.out
    assert "What is the capital of Norway?\n  before: " in done.out
    assert done.out.endswith("Report: demo/report.html\n")
    assert (tmp_path / "demo" / "report.html").is_file()


def test_a_wrong_override_of_the_demo_is_bad_usage(kitchen: Kitchen, tmp_path: Path) -> None:
    done = kitchen.run("demo", "train.steps=0", "--run", "demo", cwd=tmp_path)
    assert done.code == 2
    assert "steps" in done.err
