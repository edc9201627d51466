"""Advantages of the answers to one prompt: how much better each is than the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, TypeAlias

Advantage: TypeAlias = Literal["grpo", "rloo", "none"]

# Added to the standard deviation of a group, as in TRL.
_EPSILON = 1e-4
_FEWEST = 2  # answers that can be compared


def advantages(
    rewards: Sequence[float], kind: Advantage = "grpo", *, normalize: bool = True
) -> list[float]:
    """Advantage of each answer of a group, from the rewards r.

    `"grpo"`: r - mean(r), divided by (the sample standard deviation of r + 1e-4) if `normalize`.
    `"rloo"`: r - the mean of the other rewards. `"none"`: r. A single answer has nothing to be
    compared with, and nor have answers with equal rewards: their advantage is 0, except with
    `"none"`.

    Example:
        >>> advantages([1.0, 0.0, 0.0, 1.0], normalize=False)
        [0.5, -0.5, -0.5, 0.5]
        >>> advantages([3.0, 1.0, 2.0], "rloo")
        [1.5, -1.5, 0.0]

    References:
        Shao et al. (2024), "DeepSeekMath" (GRPO); Ahmadian et al. (2024), "Back to basics" (RLOO);
        Liu et al. (2025), "Understanding R1-Zero-like training" (without the division).
    """
    if kind == "none":
        return [float(reward) for reward in rewards]
    count = len(rewards)
    if not has_signal(rewards, kind):
        return [0.0] * count
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if kind == "rloo":  # r - (n mean - r) / (n - 1) = (r - mean) n / (n - 1)
        return [each * count / (count - 1) for each in centred]
    scale = statistics.stdev(rewards) + _EPSILON if normalize else 1.0
    return [each / scale for each in centred]


def has_signal(rewards: Sequence[float], kind: Advantage) -> bool:
    """Whether the rewards of a group tell its answers apart, so that not all advantages are 0."""
    if kind == "none":
        return any(rewards)
    return len(rewards) >= _FEWEST and min(rewards) < max(rewards)


def fewest_answers(kind: Advantage) -> int:
    """Number of answers below which a group has no advantages."""
    return 1 if kind == "none" else _FEWEST
