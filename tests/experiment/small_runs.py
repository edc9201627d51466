"""A project that trains in a second: the tiny model, a dozen lines, and terms to train with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.doctor import Finding
from steelyard.experiment import Config, read_config

L2 = {"use": "l2", "name": "l2", "weight": 0.1}
KL = {"use": "kl_to_reference", "name": "kl", "weight": 0.1}
STEADY = {  # has a state: a multiplier that changes tenfold in a step
    "use": "adaptive",
    "name": "steady",
    "weight": 0.1,
    "options": {
        "regularizer": "kl_to_reference",
        "target": 1e-4,
        "rate": 0.95,
        "clip": 1.0,
        "initial": 0.1,
    },
}
DRIFT = {"use": "ema_drift", "name": "drift", "weight": 0.1}  # has a state


class Recorder:
    """A watcher that records messages and the metrics of each step."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.counts: list[tuple[int, int]] = []  # number of the step, and of all steps
        self.changed: list[Finding] = []
        self.lasting: list[Finding] = []

    def say(self, text: str) -> None:
        self.messages.append(text)

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)
        self.counts.append((step, steps))

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:
        self.changed += changed
        self.lasting = list(lasting)


def stop_after(steps: int) -> Callable[[], bool]:
    """A `stop` of a run that lets it make so many steps."""
    answers = iter([False] * steps)
    return lambda: next(answers, True)


def noise(data: Any, logprobs: list[Tensor]) -> Tensor:
    """A term that draws from every global generator."""
    scale = random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002
    return scale * torch.cat(logprobs).square().mean()


def drawing(data: Any, logprobs: list[Tensor], *, generator: torch.Generator) -> Tensor:
    """A term that draws from the generator that it is given."""
    return torch.rand((), generator=generator) * torch.cat(logprobs).square().mean()


def failing(data: Any, logprobs: list[Tensor]) -> Tensor:
    raise RuntimeError("the knowledge base is down")


class FailsLate:
    """A term that fails at step 3, unless there is a file."""

    def __init__(self, unless: str = "") -> None:
        self._unless, self._calls = unless, 0

    def compute(self, data: Any, logprobs: list[Tensor]) -> Tensor:
        self._calls += 1  # the first one measures the held-out data
        if self._calls > 4 and not (self._unless and Path(self._unless).exists()):
            raise RuntimeError("the service is down")
        return torch.cat(logprobs).square().mean()


def detached(data: Any, logprobs: list[Tensor]) -> float:
    return 1.0


def from_logits(data: Any, logprobs: list[Tensor], logits: list[Tensor]) -> Tensor:
    return torch.cat(logits).square().mean()


def term(function: Any, **keys: Any) -> dict[str, Any]:
    """Config entry of a function of this module."""
    use = f"{__name__}:{function.__name__}"
    return {"use": use, "name": function.__name__, "weight": 0.1, **keys}


def lines(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} plus one is", "completion": f" {n + 1}."} for n in range(count)]


def write_data(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def small_config(
    folder: Path, *overrides: str, regularizers: Sequence[Mapping[str, Any]] = (L2,)
) -> Config:
    """Config of 3 steps of 2 lines out of 12, two of which are held out."""
    write_data(folder / "train.jsonl", lines(12))
    raw = {
        "model": {"base_model": "tiny-random", "rank": 2, "device": "cpu"},
        "data": {"path": "train.jsonl", "max_length": 48, "held_out": 0.2},
        "train": {"steps": 3, "batch_size": 2, "learning_rate": 1e-2, "save_every": 1},
        "regularizers": list(regularizers),
    }
    return read_config(raw, overrides, folder=folder)


def letters(record: Mapping[str, Any], answer: str) -> float:
    """A reward that differs between the answers of a random model: letters from a to m."""
    return float(sum("a" <= letter <= "m" for letter in answer.lower()))


def brief(record: Mapping[str, Any], answer: str) -> float:
    """A reward for short answers."""
    return -0.1 * len(answer)


def reward(function: Any, **keys: Any) -> dict[str, Any]:
    """Config entry of a reward of this module."""
    return {"use": f"{__name__}:{function.__name__}", **keys}


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} plus one is", "target": n + 1} for n in range(count)]


def small_rollouts(
    folder: Path,
    *overrides: str,
    rewards: Sequence[Mapping[str, Any]] = (),
    regularizers: Sequence[Mapping[str, Any]] = (),
) -> Config:
    """Config of 3 steps of 2 prompts out of 6, one of which is held out, with 4 answers each."""
    write_data(folder / "prompts.jsonl", prompts(6))
    raw = {
        "model": {"base_model": "tiny-random", "rank": 2, "device": "cpu"},
        "rollouts": {
            "prompts": "prompts.jsonl",
            "per_step": 2,
            "group_size": 4,
            "max_tokens": 6,
            "held_out": 0.2,
        },
        "train": {"steps": 3, "learning_rate": 1e-2, "save_every": 1},
        "rewards": list(rewards or (reward(letters),)),
        "regularizers": list(regularizers),
    }
    return read_config(raw, overrides, folder=folder)


def without_clock(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics without times and durations."""
    return {
        key: value
        for key, value in metrics.items()
        if key != "time" and not key.endswith(("/duration", "seconds", "_per_second"))
    }
