"""`steelyard set`, `pause` and `continue`, while a real run goes on in another process."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .command import CommandRunner
from .project import CONFIG, metrics_of, write_project

SLOW = """
[[regularizers]]
use = "own_terms:slow"
name = "slow"
weight = 0.01
"""


def wait(until: Callable[[], object]) -> None:
    """Wait for another process, ten minutes at most."""
    deadline = time.monotonic() + 600
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_a_run_is_changed_paused_continued_stopped_and_resumed(
    command: CommandRunner, tmp_path: Path
) -> None:
    folder = write_project(tmp_path, CONFIG + SLOW)
    run, log = folder / "r", folder / "r" / "log.txt"
    training = command.start("train", "c.toml", "train.steps=30", "-r", "r", cwd=folder)
    wait(lambda: steps(run) >= 2)
    done = command.run("set", "r", "drift.weight=0.5", "learning_rate=1e-3", cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "drift.weight = 0.5, from the next step on\nlearning_rate = 0.001, from the next step on\n"
    )
    wait(lambda: "drift.weight = 0.5, learning_rate = 0.001 from now on" in log.read_text())
    assert command.run("pause", "r", cwd=folder).code == 0
    wait(lambda: "paused after" in log.read_text())
    before = steps(run)
    assert "drift.weight = 0.5\n" in command.run("set", "r", cwd=folder).out
    assert command.run("continue", "r", cwd=folder).out == "r goes on.\n"
    wait(lambda: steps(run) > before)
    assert command.run("pause", "r", cwd=folder).code == 0
    wait(lambda: log.read_text().count("paused after") == 2)
    training.kill(signal.SIGINT)
    assert training.wait().code == 130
    changed = json.loads((run / "changes.jsonl").read_text().splitlines()[0])["step"]
    weights = [line["regularizers/drift/weight"] for line in metrics_of(run)]
    assert weights == [0.1] * changed + [0.5] * (len(weights) - changed)
    assert "no process trains it" in command.run("pause", "r", cwd=folder).err
    stopped = command.run("set", "r", "slow.enabled=false", cwd=folder)
    assert stopped.out == "slow.enabled = False, from its next step on, when it is resumed\n"
    assert command.run("resume", "r", cwd=folder).code == 0
    last = metrics_of(run)[-1]
    assert (last["step"], last["optim/learning_rate"]) == (29, 1e-3)
    assert "regularizers/slow/value" not in last
    ended = command.run("set", "r", "drift.weight=1", cwd=folder)
    assert (ended.code, "it is done" in ended.err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("set", "nowhere", "kl.weight=1"), 1, "RunError: nowhere must be the folder of a run"),
        (("pause", "nowhere"), 1, "RunError: nowhere must be the folder of a run"),
        (("continue", "nowhere"), 1, "RunError: nowhere must be the folder of a run"),
    ],
)
def test_no_such_run(
    command: CommandRunner, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = command.run(*arguments, cwd=tmp_path)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_the_best_checkpoint_is_used(command: CommandRunner, tmp_path: Path) -> None:
    folder = write_project(tmp_path)
    best = "train.keep_best=held_out/loss"
    overrides = ("train.steps=4", "train.evaluate_every=1", "train.save_every=0", best)
    assert command.run("train", "c.toml", *overrides, "-r", "r", cwd=folder).code == 0
    record = json.loads((folder / "r" / "checkpoints" / "best.json").read_text())
    prompt = ("sample", "r", "--prompt", "3 plus", "--max-tokens", "2")
    done = command.run(*prompt, "--checkpoint", "best", cwd=folder)
    assert done.err == f"tiny-random, trained for {record['step']} of 4 steps\n"
    exported = command.run("export", "r", "out", "--checkpoint", "best", cwd=folder)
    assert f"after {record['step']} steps" in exported.out
    both = command.run(*prompt, "--checkpoint", "best", "--step", "4", cwd=folder)
    assert (both.code, "give --step or --checkpoint, not both" in both.err) == (2, True)
    bad = command.run(*prompt, "--checkpoint", "first", cwd=folder)
    assert (bad.code, "must be best, last or a number of steps" in bad.err) == (2, True)
    assert command.run(*prompt, "--checkpoint", "4", cwd=folder).code == 0
    assert command.run(*prompt, "--checkpoint", "last", cwd=folder).code == 0
