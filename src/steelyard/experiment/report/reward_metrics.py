"""Statistics of an on-policy run: its rewards, its answers, and the answers that were dropped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.experiment.report.change import Change, change_of, mean_of
from steelyard.experiment.report.load import LoadedRun, configured_terms
from steelyard.experiment.step_metrics import short_reason

NO_TOKENS = "no tokens"


@dataclass(frozen=True)
class RewardFinding:
    """Statistics of one reward over a run.

    Attributes:
        name: name of the reward.
        mean: change of its mean over the answers of a step.
        std: mean over the steps of its standard deviation over the answers.
        weight: its last weight; 0 if it is not enabled.
        failed: number of answers for which it failed.
        held_out: change of its mean over the held-out prompts.
    """

    name: str
    mean: Change | None
    std: float | None
    weight: float
    failed: int
    held_out: Change | None


@dataclass(frozen=True)
class RolloutFindings:
    """Statistics of the answers of a run.

    Attributes:
        rewards: statistics of each reward.
        total: change of the weighted sum of the rewards; None if their weights changed, since the
            sums of different steps are then sums of something else.
        held_out: change of that sum over the held-out prompts; None as above, or if none was held
            out.
        fixed_weights: whether each reward has the same weight at all steps.
        no_signal: mean over the steps of the share of groups without signal.
        tokens: change of the mean length of the answers.
        truncated: mean over the steps of the share of answers that were cut at the maximum.
        entropy: change of the entropy estimate.
        kl: change of the KL estimate; None if no term reads the reference.
        answers: number of sampled answers that are on record.
        dropped: number of answers that were dropped.
        reasons: number of dropped answers by reason, the most frequent first.
    """

    rewards: Sequence[RewardFinding]
    total: Change | None
    held_out: Change | None
    fixed_weights: bool
    no_signal: float | None
    tokens: Change | None
    truncated: float | None
    entropy: Change | None
    kl: Change | None
    answers: int
    dropped: int
    reasons: Mapping[str, int]

    @property
    def only_reward(self) -> RewardFinding | None:
        """The reward that the weighted sum equals, if there is one."""
        weighted = [reward for reward in self.rewards if reward.weight]
        return weighted[0] if len(weighted) == 1 and weighted[0].weight == 1 else None


def rollout_findings(run: LoadedRun) -> RolloutFindings | None:
    """Compute the statistics of an on-policy run; None for a run without rewards."""
    if not run.rewards:
        return None
    fixed = all(len(set(run.series(f"rewards/{name}/weight")[1])) == 1 for name in run.rewards)
    sampled = [record for record in run.rollouts if not record.get("held_out")]

    def change(key: str, fraction: float = 0.25) -> Change | None:
        return change_of(run.series(key)[1], fraction)

    return RolloutFindings(
        rewards=[_reward(run, name) for name in run.rewards],
        total=change("rollouts/reward") if fixed else None,
        held_out=change("held_out/reward", 0) if fixed else None,
        fixed_weights=fixed,
        no_signal=mean_of(run.series("rollouts/no_signal")[1]),
        tokens=change("rollouts/answer_tokens"),
        truncated=mean_of(run.series("rollouts/truncated")[1]),
        entropy=change("rollouts/entropy"),
        kl=change("rollouts/kl"),
        answers=len(sampled),
        dropped=_total(run, "rollouts/dropped"),
        reasons=_drop_counts(sampled, run.config),
    )


def _reward(run: LoadedRun, name: str) -> RewardFinding:
    prefix = f"rewards/{name}"
    return RewardFinding(
        name,
        mean=change_of(run.series(f"{prefix}/mean")[1]),
        std=mean_of(run.series(f"{prefix}/std")[1]),
        weight=run.series(f"{prefix}/weight")[1][-1],
        failed=_total(run, f"{prefix}/failed"),
        held_out=change_of(run.series(f"held_out/{prefix}")[1], fraction=0),
    )


def _total(run: LoadedRun, key: str) -> int:
    return round(math.fsum(run.series(key)[1]))


def _drop_counts(sampled: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, int]:
    rewards = configured_terms(config, "rewards")
    enabled = [bool(entry.get("enabled", True)) for entry in rewards]
    reasons = [_drop_reason(each, enabled) for each in sampled if each.get("reward") is None]
    return dict(Counter(reasons).most_common())


def _drop_reason(record: Mapping[str, Any], enabled: Sequence[bool]) -> str:
    """Failure of the first enabled reward that failed; the rewards are in the config's order."""
    scores = record.get("rewards") or {}
    counted = {name for name, counts in zip(scores, enabled, strict=False) if counts}
    for name, reason in (record.get("failed") or {}).items():
        if name in counted:
            return f"“{name}” failed: {short_reason(str(reason))}"
    return NO_TOKENS
