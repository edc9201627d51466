"""A small experiment, and the comparison of two runs of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

CONFIG = """
[model]
base_model = "tiny-random"
rank = 4
[data]
path = "train.jsonl"
max_length = 48
[train]
steps = 8
batch_size = 3
learning_rate = 1e-2
save_every = 3
sample_prompts = ["3 plus", "One"]
sample_tokens = 4
[[regularizers]]
use = "kl_to_reference"
name = "kl"
weight = { warmup = [0.1, 4] }
[[regularizers]]
use = "ema_drift"
name = "drift"
weight = 0.1
[[regularizers]]
use = "own_terms:noise"
name = "noise"
weight = 0.01
[[regularizers]]
use = "adaptive"
name = "steady"
weight = 0.1
options = { regularizer = "l2", target = 1.0 }
"""

TERMS = '''
import os, pathlib, random, time
import numpy as np
import torch


def noise(data, logprobs):
    """Draw from every global random generator."""
    scale = random.random() + np.random.rand() + torch.rand(()).item()
    return scale * torch.cat(logprobs).square().mean()


def slow(data, logprobs):
    """Leave a test time to act, until it writes the file `hurry`."""
    if not pathlib.Path("hurry").exists():
        time.sleep(0.3)
    return torch.cat(logprobs).square().mean()


def stuck(data, logprobs):
    pathlib.Path("stuck").touch()
    time.sleep(600)


def leaky(data, logprobs):
    raise RuntimeError(f"refused: {os.environ['TINKER_API_KEY']}")


def topics(data, logprobs):
    """Read text and numbers of the data lines."""
    assert all(datum.record["topic"] == "sums" for datum in data)
    scores = torch.stack([datum.loss_fn_inputs["score"].to_torch()[0] for datum in data])
    return (scores * torch.stack([lp.mean() for lp in logprobs])).sum()


def broken(data, logprobs):
    raise RuntimeError("the knowledge base is down")


def constant(data, logprobs):
    return 1.0
'''


def write_project(folder: Path, config: str = CONFIG) -> Path:
    with (folder / "train.jsonl").open("w") as file:
        for number in range(24):
            line = {
                "prompt": f"{number} plus one is",
                "completion": f" {number + 1}.",
                "score": number / 10,
                "topic": "sums",
            }
            file.write(f"{json.dumps(line)}\n")
    (folder / "c.toml").write_text(config)
    (folder / "own_terms.py").write_text(TERMS)
    return folder


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Metrics of a run without times and durations."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            key: value
            for key, value in line.items()
            if key not in ("time", "seconds", "tokens_per_second") and not key.endswith("/duration")
        }
        for line in lines
    ]


def state_of(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer moments of the last checkpoint."""
    record = json.loads(max(run.glob("checkpoints/step-*.json")).read_text())
    folder = run / "checkpoints" / record["path"].removeprefix("tinker://")
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = safetensors.torch.load(file.read_bytes())
        state |= {f"{file.stem}/{key}": tensor for key, tensor in tensors.items()}
    return state


def terms_of(run: Path) -> Any:
    """State of the regularizers in the last checkpoint."""
    record = json.loads(max(run.glob("checkpoints/step-*.json")).read_text())
    folder = run / "checkpoints" / record["path"].removeprefix("tinker://")
    return json.loads((folder / "checkpoint.json").read_text())["companions"]


def assert_same(run: Path, other: Path) -> None:
    """Check that two runs have bit-identical metrics, samples and checkpoints."""
    assert metrics_of(run) == metrics_of(other)
    assert (run / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    assert terms_of(run) == terms_of(other)
    mine, theirs = state_of(run), state_of(other)
    assert mine.keys() == theirs.keys()
    assert len(mine) > 10
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
