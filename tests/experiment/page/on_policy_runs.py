"""An on-policy run with the tiny model, two rewards of which one fails at times, and KL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.experiment import train
from steelyard.experiment.page.load import LoadedRun, load_runs
from tests.experiment.small_runs import KL, letters, reward, small_rollouts

STEPS, WEIGHT, FAILING_LINE = 8, 0.5, 6
SECRET = "tml-s3cr3t-of-the-judge"


def judge(record: Mapping[str, Any], answer: str) -> float:
    """A reward that is down for answers to the sixth line, which is not held out."""
    if record["target"] == FAILING_LINE:
        raise ConnectionError(f"the judge is down, key {SECRET}")
    return -0.1 * len(answer)


@dataclass(frozen=True)
class OnPolicyRun:
    """A run, as the report reads it and as it stands in its files."""

    folder: Path
    metrics: list[dict[str, Any]]
    records: list[dict[str, Any]]

    @property
    def loaded(self) -> LoadedRun:
        return load_runs([self.folder]).runs[0]

    def at(self, step: int, *, held_out: bool = False) -> list[dict[str, Any]]:
        """Records of the answers of a step."""
        return [
            each
            for each in self.records
            if each["step"] == step and bool(each.get("held_out")) == held_out
        ]


def train_on_policy(folder: Path, *overrides: str, weight: Any = WEIGHT) -> OnPolicyRun:
    """Train 8 steps of 2 prompts with 4 answers each; 3 of 6 prompts are held out."""
    settings = (f"train.steps={STEPS}", "train.evaluate_every=3", "rollouts.held_out=0.5")
    failing = {"use": f"{__name__}:judge", "weight": weight}
    config = small_rollouts(
        folder,
        *settings,
        "loss.use=ppo",
        *overrides,
        rewards=[reward(letters), failing],
        regularizers=[KL],
    )
    train(config, folder / "run")
    return read_on_policy(folder / "run")


def read_on_policy(folder: Path) -> OnPolicyRun:
    lines = {
        name: [json.loads(line) for line in (folder / name).read_text("utf-8").split("\n") if line]
        for name in ("metrics.jsonl", "rollouts.jsonl")
    }
    return OnPolicyRun(folder, lines["metrics.jsonl"], lines["rollouts.jsonl"])
