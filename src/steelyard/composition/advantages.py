"""Advantages of sampled answers from one or several named rewards, and their split by reward.

With the reward r_k of weight w_k, its mean m_k over the answers of a group, the weighted sum
r = Σ w_k r_k with its mean m and sample standard deviation s over a group, and n answers in it:

    grpo   A = (r - m) / (s + ε)           A_k = w_k (r_k - m_k) / (s + ε)
    rloo   A = (r - m) n / (n - 1)         A_k = w_k (r_k - m_k) n / (n - 1)
    none   A = r                           A_k = w_k r_k
    gdpo   A = (z - mean z) / (S + ε)      A_k = w_k z_k / (S + ε)

For GDPO z_k = (r_k - m_k) / (s_k + ε) normalises each reward within its group, z = Σ w_k z_k, and
mean z and S, the sample standard deviation, are over the answers of all groups; mean z is 0 up to
rounding, since z_k adds up to 0 in each group. So A = Σ_k A_k everywhere. ε = 1e-4, as in TRL.

GRPO: Shao et al., 2024, arXiv:2402.03300; without the division: Liu et al., 2025, arXiv:2503.20783.
RLOO: Ahmadian et al., 2024, arXiv:2402.14740. GDPO: Liu et al., 2026, arXiv:2601.05242.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from steelyard.errors import InputError
from steelyard.spec.checks import is_finite

Advantage: TypeAlias = Literal["grpo", "rloo", "gdpo", "none"]
# Values of each reward for the answers of one group, by the name of the reward.
Group: TypeAlias = Mapping[str, Sequence[float]]

_EPSILON = 1e-4
_FEWEST = 2  # answers that can be compared


@dataclass(frozen=True)
class Advantages:
    """Advantages of the answers of all groups of a step.

    Attributes:
        total: advantage of each answer, by group.
        by_reward: of each group, the part of these advantages that is due to each reward, by name.
            The parts of an answer add up to its advantage. A part has the scale of the total: it is
            not the advantage that its reward alone would give.
    """

    total: Sequence[Sequence[float]]
    by_reward: Sequence[Mapping[str, Sequence[float]]]


def advantages(
    groups: Sequence[Group],
    kind: Advantage = "grpo",
    weights: Mapping[str, float] | None = None,
    *,
    normalize: bool = True,
) -> Advantages:
    """Compute the advantages of all answers of a step, and their split by reward.

    Answers whose rewards are equal, or that are alone in their group, have nothing that tells them
    apart: their advantages are 0, except with `"none"`. With `"gdpo"` this holds for each reward,
    and such answers count in the standard deviation over all answers.

    Args:
        groups: rewards of the answers to each prompt. Groups may have different sizes; leave an
            answer out if a reward is missing.
        kind: `"grpo"`, `"rloo"`, `"gdpo"` or `"none"`.
        weights: weight of each reward, by name; None: 1 for each.
        normalize: `"grpo"`: divide by the standard deviation of the group.

    Raises:
        InputError: the kind is unknown, the groups have different rewards, or a reward has no
            weight, or a value or a number of values that breaks its rule.

    Example:
        >>> groups = [{"correct": [1.0, 0.0, 0.0, 1.0], "short": [0.0, 30.0, 20.0, 10.0]}]
        >>> [round(a, 2) for a in advantages(groups).total[0]]  # the reward of larger scale wins
        [-1.17, 1.17, 0.36, -0.36]
        >>> [round(a, 2) for a in advantages(groups, "gdpo", {"correct": 1, "short": 0.5}).total[0]]
        [0.48, -0.48, -1.13, 1.13]
        >>> advantages([{"reward": [3.0, 1.0, 2.0]}], "rloo").total
        [[1.5, -1.5, 0.0]]
    """
    if kind not in get_args(Advantage):
        known = ", ".join(map(repr, get_args(Advantage)))
        raise InputError(f"advantage must be one of {known}, got {kind!r}.")
    factors = _check(groups, weights)
    by_group = _gdpo(groups, factors) if kind == "gdpo" else None
    if by_group is None:
        by_group = [_parts(group, factors, kind, normalize=normalize) for group in groups]
    totals = [[math.fsum(parts) for parts in zip(*of.values(), strict=True)] for of in by_group]
    return Advantages(totals, by_group)


def fewest_answers(kind: Advantage) -> int:
    """Number of answers below which a group has no advantages."""
    return 1 if kind == "none" else _FEWEST


def differ(values: Sequence[float]) -> bool:
    """Return whether values of the answers of a group tell the answers apart."""
    return len(values) >= _FEWEST and min(values) < max(values)


def _parts(
    group: Group, weights: Mapping[str, float], kind: Advantage, *, normalize: bool
) -> dict[str, list[float]]:
    weighted = {name: [weights[name] * value for value in group[name]] for name in group}
    if kind == "none":
        return weighted
    rewards = [math.fsum(values) for values in zip(*weighted.values(), strict=True)]
    if not differ(rewards):
        return {name: [0.0] * len(rewards) for name in group}
    count = len(rewards)
    if kind == "rloo":  # r - (n m - r) / (n - 1) = (r - m) n / (n - 1)
        scale = count / (count - 1)
    else:
        scale = 1 / (statistics.stdev(rewards) + _EPSILON) if normalize else 1.0
    return {
        name: [difference * scale for difference in _centred(values)]
        for name, values in weighted.items()
    }


def _gdpo(groups: Sequence[Group], weights: Mapping[str, float]) -> list[dict[str, list[float]]]:
    weighted = [
        {name: [weights[name] * z for z in _normalised(values)] for name, values in group.items()}
        for group in groups
    ]
    sums = [math.fsum(parts) for of in weighted for parts in zip(*of.values(), strict=True)]
    spread = statistics.stdev(sums) if len(sums) > 1 else 0.0
    return [
        {name: [z / (spread + _EPSILON) for z in values] for name, values in of.items()}
        for of in weighted
    ]


def _normalised(values: Sequence[float]) -> list[float]:
    if not differ(values):
        return [0.0] * len(values)
    scale = statistics.stdev(values) + _EPSILON
    return [difference / scale for difference in _centred(values)]


def _centred(values: Sequence[float]) -> list[float]:
    # Equal values have a mean that may differ from them in the last bit.
    mean = values[0] if not differ(values) else math.fsum(values) / len(values)
    return [value - mean for value in values]


def _check(groups: Sequence[Group], weights: Mapping[str, float] | None) -> Mapping[str, float]:
    """Weight of each reward, after checking the weights and the groups."""
    names = list(groups[0]) if groups else []
    if groups and not names:
        raise InputError("a group must have at least one reward, got none.")
    factors = dict.fromkeys(names, 1.0) if weights is None else dict(weights)
    for name in names:
        if name not in factors:
            raise InputError(
                f"weights must have one for each reward, {names}, got none for {name!r}."
            )
        if not is_finite(factors[name]) or factors[name] < 0:
            raise InputError(f"weights[{name!r}] must be a number >= 0, got {factors[name]!r}.")
    for index, group in enumerate(groups):
        _check_group(group, index, names)
    return factors


def _check_group(group: Group, index: int, names: Sequence[str]) -> None:
    if group.keys() != set(names):
        raise InputError(
            f"all groups must have the same rewards, {names}, got {list(group)} in group {index}."
        )
    counts = {name: len(values) for name, values in group.items()}
    if len(set(counts.values())) > 1:
        raise InputError(
            f"the rewards of group {index} must have one value for each answer, got {counts} of "
            f"them."
        )
    for name, values in group.items():
        for value in values:
            if not is_finite(value):
                raise InputError(
                    f"reward {name!r} must be a finite number for each answer, got {value!r} in "
                    f"group {index}: leave that answer out."
                )
