"""The command `steelyard ablate`, run for real."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from .command import CommandRunner, wait_for
from .project import assert_same, write_project

SMALL = ("train.steps=3", "train.save_every=1")

RUNS = {
    "all": "all",
    "without kl": "without-kl",
    "without drift": "without-drift",
    "without noise": "without-noise",
    "without steady": "without-steady",
    "none": "none",
}


def ablation_json(folder: Path) -> Any:
    return json.loads((folder / "ablation.json").read_text())


@pytest.fixture(scope="module")
def ablated(command: CommandRunner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = write_project(tmp_path_factory.mktemp("ablated"))
    done = command.run("ablate", "c.toml", *SMALL, "--run", "whole", cwd=project)
    assert done.code == 0, done.err
    assert "Done: 6 runs in whole" in done.out
    assert "held-out loss" in done.out
    assert "there is no verdict: --seeds 3 adds runs with two more seeds" in done.out
    return project


def test_an_ablation_compares_the_same_run_with_and_without_each_term(ablated: Path) -> None:
    found = ablation_json(ablated / "whole")
    assert found["runs"] == RUNS
    assert [row["run"] for row in found["table"]] == list(RUNS)
    terms = ["kl", "drift", "noise", "steady"]
    for row in found["table"]:
        assert list(row["terms"]) == terms, "terms that were left out are measured too"
        assert row["held_out/loss"] > 0
        assert row["seconds"] > 0
    losses = {row["run"]: row["held_out/loss"] for row in found["table"]}
    assert len(set(losses.values())) == len(losses), "every term does something"
    enabled = {
        label: [r["enabled"] for r in json.loads(text)["regularizers"]]
        for label, slug in RUNS.items()
        for text in [(ablated / "whole" / slug / "config.json").read_text()]
    }
    assert enabled["all"] == [True] * 4
    assert enabled["without drift"] == [True, False, True, True]
    assert enabled["none"] == [False] * 4


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_ablation_continues(
    command: CommandRunner, ablated: Path, end: signal.Signals
) -> None:
    args = ("ablate", "c.toml", *SMALL, "--run", end.name)
    started = command.start(*args, cwd=ablated)
    wait_for(ablated / end.name / "without-drift" / "metrics.jsonl")
    started.kill(end)
    stopped = started.wait()
    assert stopped.code in (130, -signal.SIGKILL)
    again = command.run(*args, cwd=ablated)
    assert again.code == 0, again.err
    assert "run 1 of 6: all" not in again.out, "finished runs are not repeated"
    for slug in RUNS.values():
        assert_same(ablated / end.name / slug, ablated / "whole" / slug)


def test_parallel_runs_give_the_same_results(command: CommandRunner, ablated: Path) -> None:
    folder = shutil.copytree(ablated / "whole", ablated / "jobs")
    shutil.rmtree(folder / "none")
    done = command.run("ablate", "c.toml", *SMALL, "--run", "jobs", "--jobs", "2", cwd=ablated)
    assert done.code == 0, done.err
    assert (folder / "none" / "output.txt").exists(), "it had a process of its own"
    assert_same(folder / "none", ablated / "whole" / "none")


def test_one_run_of_several_that_is_killed_is_named_and_the_others_end(
    command: CommandRunner, ablated: Path
) -> None:
    """As the kernel does when the memory is full."""
    folder = shutil.copytree(ablated / "whole", ablated / "killed")
    for slug in ("without-steady", "none"):
        shutil.rmtree(folder / slug)
    slow = ("ablate", "c.toml", *SMALL, "--run", "killed", "--jobs", "2")
    started = command.start(*slow, cwd=ablated)
    wait_for(folder / "without-steady" / "metrics.jsonl")
    (child,) = [
        process
        for process in psutil.Process(started.pid).children()
        if str(folder / "without-steady") in " ".join(process.cmdline())
        or "killed/without-steady" in " ".join(process.cmdline())
    ]
    child.kill()
    stopped = started.wait()
    assert stopped.code == 1
    assert "without-steady did not: signal 9 ended it. The others went on." in stopped.err
    assert "Start it again to continue" in stopped.err
    assert_same(folder / "none", ablated / "whole" / "none")
    again = command.run(*slow, cwd=ablated)
    assert again.code == 0, again.err
    for slug in RUNS.values():
        assert_same(folder / slug, ablated / "whole" / slug)


def test_another_config_in_the_same_folder_is_refused(
    command: CommandRunner, ablated: Path
) -> None:
    done = command.run("ablate", "c.toml", "train.steps=4", "--run", "whole", cwd=ablated)
    assert done.code == 1
    assert (
        "must be new or hold a run of this config, and it holds one with another train.steps"
        in done.err
    )


def small_project(project: Path) -> Path:
    """Leave one term in the config, and two steps."""
    config = project / "c.toml"
    kept = config.read_text().partition('[[regularizers]]\nuse = "ema_drift"')[0]
    config.write_text(kept.replace("steps = 8", "steps = 2"))
    return project


def test_seeds_give_intervals_and_verdicts(command: CommandRunner, project: Path) -> None:
    args = ("ablate", "c.toml", "--seeds", "2", "--run", "a")
    done = command.run(*args, cwd=small_project(project))
    assert done.code == 0, done.err
    assert "run 4 of 4: none, seed 1" in done.out
    begun = [line.partition("  ")[0] for line in done.out.splitlines() if ": step " in line]
    names = ("all", "none", "all, seed 1", "none, seed 1")
    assert begun == [f"{name}: step {step} ({step + 1}/2)" for name in names for step in range(2)]
    assert "means of 2 seeds" in done.out
    (cell,) = [line for line in done.out.splitlines() if line.startswith("│ none")]
    assert " ± " in cell
    assert "means of 2 seeds, paired by seed, with the 95 % interval" in done.out
    assert "Done: 4 runs in a" in done.out
    found = ablation_json(project / "a")
    assert found["seeds"]["1"] == {"all": "seed-1/all", "none": "seed-1/none"}
    written = command.run("report", "a", cwd=project)
    assert written.code == 0, written.err
    again = command.run(*args, cwd=project)
    assert "run " not in again.out.partition("effect of each term")[0], "all have finished"


def test_no_seed_is_refused(command: CommandRunner, project: Path) -> None:
    for name in ("ablate", "tune"):
        done = command.run(name, "c.toml", "--seeds", "0", cwd=project)
        assert done.code == 2
        assert "Invalid value for '--seeds'" in done.err
