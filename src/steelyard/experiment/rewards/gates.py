"""Values of rewards that depend on other rewards: gates and scales.

The value of a reward as it counts is its own value v, times two factors:

    gate = "other"      1 where the value of the other reward is above 0, else 0
    scale_by = "other"  mean of the other reward over the answers of the group that have it

A function that takes the argument `scores` computes its value from those of other rewards. All of
them are the values as they count. `in_order` of `reward` finds which are computed first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from steelyard.experiment.rewards.reward import Reward, Score
from steelyard.spec.error_messages import title


def counted(
    reward: Reward,
    own: Sequence[Score],
    scores: Mapping[str, Sequence[Score]],
    groups: Sequence[int],
) -> list[Score]:
    """Scores of a reward as they count, after its gate and its scale.

    Args:
        reward: the reward.
        own: what it gave for each answer.
        scores: of the rewards before it, as they count.
        groups: number of the group of each answer.
    """
    counted = list(own)
    if reward.gate:
        counted = [
            _combined(score, other, reward.gate, lambda value: float(value > 0))
            for score, other in zip(counted, scores[reward.gate], strict=True)
        ]
    if reward.scale_by:
        means = _group_means(scores[reward.scale_by], groups)
        for index, group in enumerate(groups):
            mean = Score(means.get(group), "no answer of the group has it")
            counted[index] = _combined(counted[index], mean, reward.scale_by, float)
    return counted


def values_for(
    reward: Reward, names: Sequence[str], scores: Mapping[str, Sequence[Score]], index: int
) -> dict[str, float] | Score:
    """Values of the rewards that a function reads, for one answer; a failure if one has none."""
    values = {}
    for name in reward.reads_scores(names):
        score = scores[name][index]
        if score.value is None:
            return _failed(name, score)
        values[name] = score.value
    return values


def _combined(score: Score, other: Score, name: str, factor: Callable[[float], float]) -> Score:
    if score.value is None:
        return score
    if other.value is None:
        return _failed(name, other)
    return replace(score, value=score.value * factor(other.value))


def _failed(name: str, score: Score) -> Score:
    return Score(error=f"it needs the {title(name, 'reward')}, which failed: {score.error}")


def _group_means(scores: Sequence[Score], groups: Sequence[int]) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        if score.value is not None:
            values.setdefault(group, []).append(score.value)
    return {group: math.fsum(of_group) / len(of_group) for group, of_group in values.items()}
