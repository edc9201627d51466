"""Resume after a kill at random moments: the metrics and weights are bit-identical."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from .command import CommandRunner
from .project import assert_same, metrics_of, write_project

KILLS = 10


@pytest.fixture(scope="module")
def uninterrupted(
    command: CommandRunner, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, float]:
    """A project with a run that was never interrupted, and the seconds it took."""
    folder = write_project(tmp_path_factory.mktemp("project"))
    began = time.monotonic()
    done = command.run("train", "c.toml", "--run", "whole", cwd=folder)
    assert done.code == 0, done.err
    return folder, time.monotonic() - began


def lines_in(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def test_a_killed_run_resumes_to_the_same_bits(
    command: CommandRunner, uninterrupted: tuple[Path, float]
) -> None:
    folder, seconds = uninterrupted
    whole = metrics_of(folder / "whole")
    chance = random.Random(0)
    checkpoints = []
    for number in range(KILLS):
        run = folder / f"killed-{number}"
        started = command.start("train", "c.toml", "--run", run.name, cwd=folder)
        steps = chance.randrange(len(whole)) if number else 0
        while lines_in(run / "metrics.jsonl") < steps or not (run / "config.json").exists():
            time.sleep(0.001)
        if number:  # the first one is killed as soon as it exists, before any checkpoint
            time.sleep(chance.uniform(0, 0.9 * seconds / len(whole)))
        started.kill(signal.SIGKILL)
        started.wait()
        checkpoints.append(len(list(run.glob("checkpoints/step-*.json"))))
        done = command.run("resume", run.name, cwd=folder)
        assert done.code == 0, done.err
        assert_same(run, folder / "whole")
    assert 0 in checkpoints, "all were killed late"
    assert max(checkpoints) > 0, "all were killed early"


def test_a_half_written_line_is_written_again(
    command: CommandRunner, uninterrupted: tuple[Path, float]
) -> None:
    folder, _ = uninterrupted
    run = folder / "half"
    command.run("train", "c.toml", "train.steps=5", "--run", run.name, cwd=folder)
    config = json.loads((run / "config.json").read_text())
    config["train"]["steps"] = 8
    (run / "config.json").write_text(json.dumps(config))
    (run / "result.json").unlink()
    last = max(run.glob("checkpoints/step-*.json"))
    last.unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss_to')
    done = command.run("resume", run.name, cwd=folder)
    assert done.code == 0, done.err
    assert [line["step"] for line in metrics_of(run)] == list(range(8))


def test_a_finished_run_is_left_alone(
    command: CommandRunner, uninterrupted: tuple[Path, float]
) -> None:
    folder, _ = uninterrupted
    before = (folder / "whole" / "metrics.jsonl").read_bytes()
    done = command.run("resume", "whole", cwd=folder)
    assert done.code == 0
    assert "Done: 8 steps in whole" in done.out
    assert (folder / "whole" / "metrics.jsonl").read_bytes() == before


def test_shortened_metrics_are_an_error(command: CommandRunner, project: Path) -> None:
    command.run("train", "c.toml", "train.steps=3", "--run", "r", cwd=project)
    (project / "r" / "result.json").unlink()
    (project / "r" / "metrics.jsonl").write_text("")
    done = command.run("resume", "r", cwd=project)
    assert done.code == 1
    assert "metrics.jsonl must hold the" in done.err


def test_changed_data_are_an_error(command: CommandRunner, project: Path) -> None:
    command.run("train", "c.toml", "train.steps=3", "--run", "r", cwd=project)
    (project / "r" / "result.json").unlink()
    data = project / "train.jsonl"
    data.write_text(data.read_text().replace("plus one", "plus two"))
    done = command.run("resume", "r", cwd=project)
    assert done.code == 1
    assert f"RunError: {data} must be as it was when the run began, and it has changed" in done.err
