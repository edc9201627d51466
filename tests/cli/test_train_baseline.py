"""`steelyard train --baseline`, run for real."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from .command import CommandRunner, wait_for
from .project import assert_same, metrics_of

SMALL = ("train.steps=2", "train.save_every=1")


def test_a_baseline_ends_with_a_table_and_a_sentence(command: CommandRunner, project: Path) -> None:
    args = ("train", "c.toml", *SMALL, "--baseline")
    done = command.run(*args, cwd=project)
    assert done.code == 0, done.err
    folder = project / "runs" / "c-baseline"
    losses = [metrics_of(folder / run)[-1]["held_out/loss"] for run in ("all", "none")]
    assert losses[0] != losses[1]
    with_terms, without = (f"{loss:.4g}" for loss in losses)
    (row,) = [line for line in done.out.splitlines() if line.startswith("│ held-out loss")]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["held-out loss", with_terms, without, f"{losses[0] - losses[1]:+.2g}"]
    assert all(f"│ {name} " in done.out for name in ("kl", "drift", "noise", "steady", "time"))
    assert (
        f"The held-out loss is {with_terms} with the terms, {without} without: not resolved with "
        f"one seed (--seeds 3 adds two)." in done.out
    )
    assert done.out.endswith("Done: 2 runs in runs/c-baseline\n")
    written = command.run("report", str(folder), cwd=project)
    assert written.code == 0, written.err
    again = command.run(*args, cwd=project)
    assert "run 1 of 2" not in again.out, "both have finished"
    assert again.out.endswith(done.out.partition("with and without the terms")[2])


def test_an_interrupted_baseline_goes_on_with_the_same_command(
    command: CommandRunner, project: Path
) -> None:
    args = ("train", "c.toml", *SMALL, "--baseline", "--seeds", "2", "--run", "b")
    whole = command.run(*args[:-1], "whole", cwd=project)
    assert whole.code == 0, whole.err
    assert "means of 2 seeds" in whole.out
    started = command.start(*args, cwd=project)
    wait_for(project / "b" / "none" / "metrics.jsonl")
    started.kill(signal.SIGINT)
    stopped = started.wait()
    assert stopped.code == 130, stopped.err
    assert "Stopped and saved. Run the same command again to continue: b" in stopped.out
    again = command.run(*args, cwd=project)
    assert again.code == 0, again.err
    for run in ("all", "none", "seed-1/all", "seed-1/none"):
        assert_same(project / "b" / run, project / "whole" / run)


def test_on_policy_runs_are_compared_by_their_rewards(
    command: CommandRunner, project: Path
) -> None:
    example = command.run("config", "example", "--on-policy", cwd=project).out
    (project / "on_policy.toml").write_text(example)
    (project / "prompts.jsonl").write_text('{"prompt": "Name a fruit."}\n' * 12)
    tiny = ["model.base_model=tiny-random", "model.rank=2", "rollouts.max_tokens=6"]
    args = ("train", "on_policy.toml", *tiny, "train.steps=2", "--baseline", "--run", "b")
    done = command.run(*args, cwd=project)
    assert done.code == 0, done.err
    assert "The held-out reward is " in done.out
    table = json.loads((project / "b" / "ablation.json").read_text())["table"]
    assert [row["run"] for row in table] == ["all", "none"]
    assert all("short" in row["rewards"] for row in table)


def test_seeds_are_for_a_comparison(command: CommandRunner, project: Path) -> None:
    done = command.run("train", "c.toml", "--seeds", "3", cwd=project)
    assert done.code == 2
    assert "--seeds is for a comparison: give --baseline too, or ablate." in done.err
