from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from .command import Kitchen
from .project import assert_same, metrics_of, write_project

KILLS = 10


@pytest.fixture(scope="module")
def uninterrupted(kitchen: Kitchen, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A project with a run that was never interrupted, and the seconds it took."""
    folder = write_project(tmp_path_factory.mktemp("project"))
    began = time.monotonic()
    done = kitchen.run("train", "c.toml", "--run", "whole", cwd=folder)
    assert done.code == 0, done.err
    return folder, time.monotonic() - began


def lines_in(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def test_a_run_that_was_killed_ends_with_the_same_bits(
    kitchen: Kitchen, uninterrupted: tuple[Path, float]
) -> None:
    folder, seconds = uninterrupted
    whole = metrics_of(folder / "whole")
    chance = random.Random(0)
    checkpoints = []
    for number in range(KILLS):
        run = folder / f"killed-{number}"
        started = kitchen.start("train", "c.toml", "--run", run.name, cwd=folder)
        steps = chance.randrange(len(whole))
        while lines_in(run / "metrics.jsonl") < steps or not (run / "config.json").exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.9 * seconds / len(whole)))
        started.kill(signal.SIGKILL)
        started.wait()
        checkpoints.append(len(list(run.glob("checkpoints/step-*.json"))))
        done = kitchen.run("resume", run.name, cwd=folder)
        assert done.code == 0, done.err
        assert_same(run, folder / "whole")
    assert 0 in checkpoints, "all were killed late"
    assert max(checkpoints) > 0, "all were killed early"


def test_a_half_written_line_is_written_again(
    kitchen: Kitchen, uninterrupted: tuple[Path, float]
) -> None:
    folder, _ = uninterrupted
    run = folder / "half"
    kitchen.run("train", "c.toml", "train.steps=5", "--run", run.name, cwd=folder)
    config = json.loads((run / "config.json").read_text())
    config["train"]["steps"] = 8
    (run / "config.json").write_text(json.dumps(config))
    (run / "result.json").unlink()
    last = max(run.glob("checkpoints/step-*.json"))
    last.unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss_to')
    done = kitchen.run("resume", run.name, cwd=folder)
    assert done.code == 0, done.err
    assert [line["step"] for line in metrics_of(run)] == list(range(8))


def test_a_finished_run_is_left_alone(kitchen: Kitchen, uninterrupted: tuple[Path, float]) -> None:
    folder, _ = uninterrupted
    before = (folder / "whole" / "metrics.jsonl").read_bytes()
    done = kitchen.run("resume", "whole", cwd=folder)
    assert done.code == 0
    assert "Done: 8 steps in whole" in done.out
    assert (folder / "whole" / "metrics.jsonl").read_bytes() == before


def test_metrics_that_were_shortened_are_an_error(kitchen: Kitchen, project: Path) -> None:
    kitchen.run("train", "c.toml", "train.steps=3", "--run", "r", cwd=project)
    (project / "r" / "result.json").unlink()
    (project / "r" / "metrics.jsonl").write_text("")
    done = kitchen.run("resume", "r", cwd=project)
    assert done.code == 1
    assert "metrics.jsonl must hold the" in done.err


def test_data_that_were_changed_are_an_error(kitchen: Kitchen, project: Path) -> None:
    kitchen.run("train", "c.toml", "train.steps=3", "--run", "r", cwd=project)
    (project / "r" / "result.json").unlink()
    data = project / "train.jsonl"
    data.write_text(data.read_text().replace("plus one", "plus two"))
    done = kitchen.run("resume", "r", cwd=project)
    assert done.code == 1
    assert f"RunError: {data} must be as it was when the run began, and it has changed" in done.err
