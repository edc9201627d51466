"""Ablations and searches: many runs in one folder, and on from where they were."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from .command import Kitchen
from .project import assert_same

SMALL = ("train.steps=3", "train.save_every=1")
RUNS = {
    "all": "all",
    "without kl": "without-kl",
    "without drift": "without-drift",
    "without noise": "without-noise",
    "without steady": "without-steady",
    "none": "none",
}


def ablation(folder: Path) -> Any:
    return json.loads((folder / "ablation.json").read_text())


@pytest.fixture
def ablated(kitchen: Kitchen, project: Path) -> Path:
    done = kitchen.run("ablate", "c.toml", *SMALL, "--run", "whole", cwd=project)
    assert done.code == 0, done.err
    assert "Done: 6 runs in whole" in done.out
    assert "held-out loss" in done.out
    return project


def test_an_ablation_compares_the_same_run_with_and_without_each_term(ablated: Path) -> None:
    found = ablation(ablated / "whole")
    assert found["runs"] == RUNS
    assert [row["run"] for row in found["table"]] == list(RUNS)
    terms = ["kl", "drift", "noise", "steady"]
    for row in found["table"]:
        assert list(row["terms"]) == terms, "terms are measured where they were not trained with"
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
def test_an_ablation_goes_on(kitchen: Kitchen, ablated: Path, end: signal.Signals) -> None:
    args = ("ablate", "c.toml", *SMALL, "--run", "r")
    started = kitchen.start(*args, cwd=ablated)
    while not (ablated / "r" / "without-drift" / "metrics.jsonl").exists():
        time.sleep(0.005)
    started.kill(end)
    stopped = started.wait()
    assert stopped.code in (130, -signal.SIGKILL)
    again = kitchen.run(*args, cwd=ablated)
    assert again.code == 0, again.err
    assert "run all" not in again.out, "what was done is not done again"
    for slug in RUNS.values():
        assert_same(ablated / "r" / slug, ablated / "whole" / slug)


def test_runs_side_by_side_come_to_the_same(kitchen: Kitchen, project: Path) -> None:
    config = project / "c.toml"
    kept = config.read_text().partition('[[regularizers]]\nuse = "ema_drift"')[0]
    config.write_text(kept.replace("steps = 8", "steps = 3"))
    one = kitchen.run("ablate", "c.toml", "--run", "one", cwd=project)
    two = kitchen.run("ablate", "c.toml", "--run", "two", "--jobs", "2", cwd=project)
    assert (one.code, two.code) == (0, 0), two.err
    for slug in ("all", "none"):
        assert_same(project / "one" / slug, project / "two" / slug)


def test_another_config_in_the_same_folder_is_refused(kitchen: Kitchen, ablated: Path) -> None:
    done = kitchen.run("ablate", "c.toml", "train.steps=4", "--run", "whole", cwd=ablated)
    assert done.code == 1
    assert "must be new or hold runs of this config" in done.err


TUNED = (
    "train.steps=4",
    "regularizers.kl.weight={tune = [1e-3, 10.0], log = true}",
    "regularizers.drift.weight={tune = [0.0, 1.0]}",
)


def test_a_search_finds_weights_and_goes_on(kitchen: Kitchen, project: Path) -> None:
    args = ("tune", "c.toml", *TUNED, "--run", "t")
    first = kitchen.run(*args, "--trials", "2", cwd=project)
    assert first.code == 0, first.err
    assert "Best of 2 trials: " in first.out
    started = kitchen.start(*args, "--trials", "5", cwd=project)
    while not (project / "t" / "trial-0003" / "metrics.jsonl").exists():
        time.sleep(0.005)
    started.kill(signal.SIGKILL)
    started.wait()
    again = kitchen.run(*args, "--trials", "5", cwd=project)
    assert again.code == 0, again.err
    assert "trial 2:" not in again.out
    assert "trial 3:" in again.out, "what was cut short is gone on with"
    assert "Best of 5 trials: " in again.out
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
    trained = kitchen.run("train", "t/best.json", "train.steps=2", "--run", "b", cwd=project)
    assert trained.code == 0, trained.err


def test_an_objective_may_weigh_several_metrics(kitchen: Kitchen, project: Path) -> None:
    objective = 'tune.objective={"held_out/loss" = 1.0, "held_out/regularizers/kl" = 0.5}'
    args = ("tune", "c.toml", *TUNED, "--trials", "1", "--run", "t")
    done = kitchen.run(*args, objective, cwd=project)
    assert done.code == 0, done.err
    metrics = json.loads((project / "t" / "trial-0000" / "result.json").read_text())["metrics"]
    value = metrics["held_out/loss"] + 0.5 * metrics["held_out/regularizers/kl"]
    assert f"Best of 1 trials: {value:.6g}" in done.out
    wrong = ("tune", "c.toml", *TUNED, "--trials", "1", "--run", "w", "tune.objective=gone")
    done = kitchen.run(*wrong, cwd=project)
    assert done.code == 2
    assert "[tune]: objective must be made of keys of the metrics, got 'gone'" in done.err
