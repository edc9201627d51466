"""The command `steelyard demo`, run for real."""

from __future__ import annotations

import signal
from pathlib import Path

from .command import CommandRunner, wait_for

TINY = ("model.base_model=tiny-random", "data.max_length=320", "train.sample_tokens=4")
SHORT = ("demo", *TINY, "train.steps=2", "train.batch_size=2")


def test_demo_ends_with_answers_numbers_and_the_report(
    command: CommandRunner, tmp_path: Path
) -> None:
    started = command.start(*SHORT, cwd=tmp_path)
    wait_for(tmp_path / "runs" / "demo" / "none" / "metrics.jsonl")
    started.kill(signal.SIGINT)
    stopped = started.wait()
    assert stopped.code == 130, stopped.err
    assert "Run the same command again to continue: runs/demo\n" in stopped.out
    done = command.run(*SHORT, cwd=tmp_path)
    assert done.code == 0, done.err
    parts = [
        "It is trained three times",
        "run 3 of 3: mixed",
        "\nWhat is a comet?\n        untrained: ",
        "\n  trained plainly: ",
        "\n    with the term: ",
        "questions answered",
        "│ questions mixed in ",
        "\nReport of the three runs: runs/demo/report.html\n",
        "steelyard watch runs/demo\n",
    ]
    places = [done.out.find(part) for part in parts]
    assert -1 not in places, done.out
    assert places == sorted(places)
    assert done.out.count(" of 20 │") == 4
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()


def test_a_wrong_override_of_the_demo_is_bad_usage(command: CommandRunner, tmp_path: Path) -> None:
    done = command.run("demo", "train.steps=0", "--run", "demo", cwd=tmp_path)
    assert done.code == 2
    assert "steps" in done.err
