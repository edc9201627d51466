"""The command `steelyard tune`, run for real."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from .command import CommandRunner, wait_for

TUNED = (
    "train.steps=4",
    "regularizers.kl.weight={tune = [1e-3, 10.0], log = true}",
    "regularizers.drift.weight={tune = [0.0, 1.0]}",
)


def test_a_search_finds_weights_and_continues(command: CommandRunner, project: Path) -> None:
    args = ("tune", "c.toml", *TUNED, "--run", "t")
    first = command.run(*args, "--trials", "2", cwd=project)
    assert first.code == 0, first.err
    assert "Best of 2 trials: " in first.out
    started = command.start(*args, "--trials", "5", cwd=project)
    wait_for(project / "t" / "trial-0003" / "metrics.jsonl")
    started.kill(signal.SIGKILL)
    started.wait()
    again = command.run(*args, "--trials", "5", cwd=project)
    assert again.code == 0, again.err
    assert "trial 2:" not in again.out
    assert "trial 3:" in again.out, "an interrupted trial is continued"
    assert "Best of 5 trials: " in again.out
    table = again.out.partition("trials, the best first")[2]
    for column in ("trial", "objective", "kl", "drift", "state", "time"):
        assert column in table.splitlines()[2]
    rows = [line.split("│") for line in table.splitlines() if line.startswith("│")]
    assert len(rows) == 5
    objectives = [float(row[2]) for row in rows if row[5].strip() == "completed"]
    assert objectives == sorted(objectives)
    written = command.run("report", "t", cwd=project)
    assert (written.code, written.out) == (0, "Report: t/report.html\n"), written.err
    results = [project / "t" / f"trial-{number:04d}" / "result.json" for number in range(5)]
    values = {
        file.parent.name: json.loads(file.read_text())["metrics"]["held_out/loss"]
        for file in results
        if file.exists()
    }
    assert len(values) >= 3
    best = json.loads((project / "t" / "best.json").read_text())
    winner = min(values, key=lambda name: values[name])
    chosen = json.loads((project / "t" / winner / "config.json").read_text())
    assert best["regularizers"] == chosen["regularizers"]
    assert 1e-3 <= best["regularizers"][0]["weight"] <= 10
    trained = command.run("train", "t/best.json", "train.steps=2", "--run", "b", cwd=project)
    assert trained.code == 0, trained.err


def test_an_objective_may_combine_several_metrics(command: CommandRunner, project: Path) -> None:
    objective = 'tune.objective={"held_out/loss" = 1.0, "held_out/regularizers/kl" = 0.5}'
    args = ("tune", "c.toml", *TUNED, "--trials", "1", "--run", "t")
    done = command.run(*args, objective, cwd=project)
    assert done.code == 0, done.err
    metrics = json.loads((project / "t" / "trial-0000" / "result.json").read_text())["metrics"]
    value = metrics["held_out/loss"] + 0.5 * metrics["held_out/regularizers/kl"]
    assert f"Best of 1 trials: {value:.6g}" in done.out
    wrong = ("tune", "c.toml", *TUNED, "--trials", "1", "--run", "w", "tune.objective=gone")
    done = command.run(*wrong, cwd=project)
    assert done.code == 2
    assert "[tune]: objective must be made of keys of the metrics, got 'gone'" in done.err


def test_a_search_in_which_every_trial_failed_has_failed(
    command: CommandRunner, project: Path
) -> None:
    failing = "regularizers.drift.use=own_terms:broken"
    args = ("tune", "c.toml", TUNED[0], TUNED[1], failing, "--trials", "1", "--run", "t")
    done = command.run(*args, cwd=project)
    assert done.code == 1
    assert "trial 0 failed: regularizer 'drift' failed" in done.out
    assert done.err == "No trial was completed, and there are no best weights: t\n"
