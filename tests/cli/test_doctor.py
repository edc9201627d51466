"""The command `steelyard doctor`, run for real on recorded metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.cli.doctor import name_problems
from tests.experiment.run.test_health import rows_of, write

from .command import CommandRunner


def test_a_problem_is_shown_with_its_cure_and_exits_with_1(
    command: CommandRunner, tmp_path: Path
) -> None:
    write(tmp_path / "run", rows_of(5.9, 5.0, 12.7))
    done = command.run("doctor", "run", cwd=tmp_path)
    assert done.code == 1
    assert done.out == (
        "run: 3 steps\n"
        "problem, since step 2: on held-out data the model is worse than untrained\n"
        "  evidence: held-out loss 5.9 → 12.7 at step 2\n"
        "  cure: divide the learning rate by 10 (from 0.01 to 0.001), or give the terms less "
        "weight\n"
    )
    assert done.err == ""


def test_what_is_over_is_no_problem(command: CommandRunner, tmp_path: Path) -> None:
    write(tmp_path / "run", rows_of(2.0, 3.0, 1.5))
    done = command.run("doctor", "run", cwd=tmp_path)
    assert done.code == 0
    assert done.out == (
        "run: 3 steps\n"
        "Over at step 2, since step 1: on held-out data the model is worse than untrained.\n"
    )


def test_several_runs_as_json(command: CommandRunner, tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a", rows_of(2.0, 1.9))
    write(tmp_path / "runs" / "b", rows_of(2.0, 3.0))
    done = command.run("doctor", "runs", "--json", cwd=tmp_path)
    assert done.code == 1
    first, second = json.loads(done.out)
    assert first == {"run": "runs/a", "steps": 2, "findings": []}
    assert [finding["rule"] for finding in second["findings"]] == ["worse than untrained"]


def test_a_run_without_findings(command: CommandRunner, tmp_path: Path) -> None:
    write(tmp_path / "run", rows_of(2.0))
    done = command.run("doctor", "run", cwd=tmp_path)
    assert (done.code, done.out) == (0, "run: 1 step, no findings\n")


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (["doctor"], 2, "Missing argument 'RUN'"),
        (["doctor", "nowhere"], 1, "RunError: nowhere is no folder: a run has config.json"),
    ],
)
def test_a_wrong_use_has_an_exit_code_and_a_reason(
    command: CommandRunner, args: list[str], code: int, reason: str, tmp_path: Path
) -> None:
    done = command.run(*args, cwd=tmp_path)
    assert done.code == code
    assert reason in done.err


def test_a_run_that_ends_with_a_problem_says_so(command: CommandRunner, project: Path) -> None:
    settings = ("train.learning_rate=0.5", "train.steps=4")
    done = command.run("train", "c.toml", *settings, "--run", "r", cwd=project)
    assert done.code == 0
    assert done.out.count("problem: On held-out data the model is worse than untrained") == 1
    assert done.out.endswith(
        "With problems (steelyard doctor r says what to change):\n  worse than untrained\n"
    )


def test_an_ablation_names_its_runs_with_problems(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "all", rows_of(2.0, 1.9))
    write(tmp_path / "without-kl", rows_of(2.0, 3.0))
    name_problems(tmp_path)
    assert capsys.readouterr().out.splitlines()[1:] == ["  without-kl: worse than untrained"]
    name_problems(tmp_path / "all")
    assert capsys.readouterr().out == ""
