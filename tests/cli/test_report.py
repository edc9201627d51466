"""The command `steelyard report`, run for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiment.folders import write_ablation, write_run

from .command import CommandRunner


def test_a_report_is_written_into_the_run(command: CommandRunner, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    done = command.run("report", "run", cwd=tmp_path)
    assert (done.code, done.out) == (0, "Report: run/report.html\n")
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_report_of_several_runs_is_written_here_or_to_the_given_file(
    command: CommandRunner, tmp_path: Path
) -> None:
    write_run(tmp_path / "a", steps=2)
    write_ablation(tmp_path / "b")
    done = command.run("report", "a", "b", cwd=tmp_path)
    assert (done.code, done.out) == (0, "Report: report.html\n")
    done = command.run("report", "b", "-o", "pages/b.html", cwd=tmp_path)
    assert (done.code, done.out) == (0, "Report: pages/b.html\n")


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (["report"], 2, "Missing argument 'RUN...'"),
        (["report", "nowhere", "-o", "."], 2, "--output must be a file, got the folder ."),
        (["report", "nowhere"], 1, "RunError: nowhere is no folder"),
    ],
)
def test_a_wrong_use_has_an_exit_code_and_a_reason(
    command: CommandRunner, args: list[str], code: int, reason: str, tmp_path: Path
) -> None:
    done = command.run(*args, cwd=tmp_path)
    assert done.code == code
    assert reason in done.err
