"""tinker-cookbook 0.5.8, unmodified: its loops with plain clients and with a KL term."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard.engine.server.app import RunningServer


@pytest.fixture(scope="module")
def runs(running: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs, all made by one process."""
    assert importlib.metadata.version("tinker-cookbook") == "0.5.8"
    folder = tmp_path_factory.mktemp("cookbook")
    script = Path(__file__).with_name("cookbook.py")
    done = subprocess.run(
        [sys.executable, str(script), running.base_url, str(folder)],
        env={**os.environ, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def metrics(run: Path, name: str) -> list[float]:
    """The values of a metric, step by step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line[name] for line in map(json.loads, lines) if name in line]


def results(runs: Path, place: str) -> Any:
    return json.loads((runs / "results.json").read_text())[place]


@pytest.mark.parametrize("name", ["supervised", "dpo", "supervised with kl", "dpo with kl"])
def test_supervised_training_and_dpo_bring_the_loss_down(
    runs: Path, folder: Path, name: str
) -> None:
    run = runs / "served" / name
    losses = metrics(run, "train_mean_nll" if "supervised" in name else "dpo_loss")
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0], losses  # the adapter begins anywhere
    saved = json.loads((run / "checkpoints.jsonl").read_text().splitlines()[-1])
    path = saved["state_path"].removeprefix("tinker://")
    assert (folder / path / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("supervised", 0),
        ("supervised with kl", 4),
        ("dpo with kl", 4),
        ("rl with kl", 4),  # two steps with two substeps
        ("rl streamed with kl", 4),  # two steps with two minibatches
        ("rl async with kl", 2),
        ("distillation with kl", 2),
    ],
)
def test_the_term_counts_once_in_every_call_of_a_loop(runs: Path, name: str, calls: int) -> None:
    values = results(runs, "served")[name]["kl"]
    assert len(values) == calls
    # The adapter begins at the base model, so the divergence is 0 before the first step.
    assert values[:1] == pytest.approx([0.0] * bool(calls), abs=1e-6)
    assert not values or values[-1] > 1e-3


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("rl", "env/all/reward/total"),
        ("distillation", "env/all/reward/total"),
        ("supervised", "train_mean_nll"),
        ("dpo", "dpo_loss"),
    ],
)
def test_a_loop_learns_and_drifts_less_with_the_term(runs: Path, name: str, metric: str) -> None:
    found = metrics(runs / "embedded" / name, metric)
    plain = results(runs, "embedded")[name]
    with_kl = results(runs, "embedded")[f"{name} with kl"]
    if metric == "env/all/reward/total":
        assert plain["reward"] > found[0] + 0.1, (plain, found)
        assert with_kl["drift"] < 0.6 * plain["drift"]
    else:
        assert found[-1] < 0.9 * found[0], found
        assert with_kl["distance"] < 0.6 * plain["distance"]
