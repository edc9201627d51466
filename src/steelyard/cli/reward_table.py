"""Rewards and answers of one step, as table rows and as short facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.experiment import reward_names

# Metrics of the answers, with the words and the form in which they are shown.
_FACTS = (
    ("rollouts/no_signal", "groups without signal", "{:.0%}"),
    ("rollouts/answer_tokens", "tokens per answer", "{:.1f}"),
    ("rollouts/truncated", "truncated", "{:.0%}"),
    ("rollouts/dropped", "dropped", "{:.0f}"),
    ("rollouts/entropy", "entropy", "{:.3g}"),
    ("rollouts/kl", "KL", "{:.3g}"),
    ("clip_fraction", "clipped", "{:.0%}"),
)


@dataclass(frozen=True)
class RewardRow:
    """Numbers of one reward at one step.

    Attributes:
        name: name of the reward.
        mean: mean over the answers; None if it failed for all of them.
        std: sample standard deviation over the answers.
        weight: weight at this step; 0 if it is not enabled.
        failed: number of answers for which it failed.
    """

    name: str
    mean: float | None
    std: float | None
    weight: float
    failed: int

    @property
    def text(self) -> str:
        """Mean and standard deviation, and for how many answers it failed, if any."""
        if self.mean is None:
            return "failed"
        failed = f" ({self.failed} failed)" if self.failed else ""
        return f"{self.mean:.3g} ± {self.std:.2g}{failed}"


def reward_rows(metrics: Mapping[str, Any]) -> list[RewardRow]:
    """Rows of the rewards of a step, in order; none for a run without rollouts.

    Example:
        >>> reward_rows({"rewards/a/mean": 0.5, "rewards/a/std": 0.1, "rewards/a/weight": 2.0})
        [RewardRow(name='a', mean=0.5, std=0.1, weight=2.0, failed=0)]
    """
    return [
        RewardRow(
            name,
            metrics.get(f"rewards/{name}/mean"),
            metrics.get(f"rewards/{name}/std"),
            metrics[f"rewards/{name}/weight"],
            int(metrics.get(f"rewards/{name}/failed", 0)),
        )
        for name in reward_names(metrics)
    ]


def answer_facts(metrics: Mapping[str, Any]) -> list[str]:
    """Short texts about the answers of a step; none for a run without rollouts.

    Example:
        >>> answer_facts({"rollouts/reward": 0.5, "rollouts/reward_std": 0.1, "rollouts/kl": 0.02})
        ['reward 0.5 ± 0.1', 'KL 0.02']
    """
    facts = []
    if "rollouts/reward" in metrics:
        mean, std = metrics["rollouts/reward"], metrics["rollouts/reward_std"]
        facts.append(f"reward {mean:.3g} ± {std:.2g}")
    return facts + [
        f"{label} {form.format(metrics[key])}"
        for key, label, form in _FACTS
        # Answers are rarely dropped.
        if key in metrics and (key != "rollouts/dropped" or metrics[key])
    ]
