"""Means over seeds, and differences paired by seed, with 95 % confidence intervals.

Runs with the same seed share their initial weights and the order of their data. Much of what
varies from seed to seed is therefore the same in both runs of a pair, and cancels in their
difference; the interval of the mean difference is narrower than those of the two means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

BySeed: TypeAlias = Mapping[Any, float | None]  # `Any`: the keys of a mapping are invariant

CONFIDENCE = 0.95
LOSS, REWARD = "held-out loss", "held-out reward"
_ONE_REWARD = "reward "  # begins the quantity of one of the rewards
NO_EFFECT = "no visible effect"
_ONE_SEED = (
    "These are differences between single runs. Other seeds may give others, so there is no "
    "verdict: --seeds 3 adds runs with two more seeds, and intervals."
)
_INTERVALS = (
    "Differences are those from the run with all terms: means of {count} seeds, paired by seed, "
    "with the 95 % interval by Student's t. There is a verdict only where it excludes 0."
)


@dataclass(frozen=True)
class Estimate:
    """Mean of several values, with the 95 % interval `mean ± margin`.

    Attributes:
        mean: mean of the values.
        margin: half the width of the interval; None for a single value.
        count: number of values.
    """

    mean: float
    margin: float | None
    count: int

    @property
    def differs_from_zero(self) -> bool | None:
        """Whether the interval excludes 0; None if there is no interval."""
        return None if self.margin is None else abs(self.mean) > self.margin


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and interval of values that are independent and roughly normal.

    The margin is t · s / √n: s is the standard deviation with n - 1 in its denominator, t the
    0.975 quantile of Student's distribution with n - 1 degrees of freedom.

    Returns:
        The estimate; None without values, or if one is not finite.

    Example:
        >>> found = estimate([1.0, 2.0, 3.0])
        >>> found.mean, round(found.margin, 3), found.differs_from_zero
        (2.0, 2.484, False)
    """
    count = len(values)
    if not values or not all(math.isfinite(value) for value in values):
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, count)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, t_quantile(count - 1) * math.sqrt(variance / count), count)


@dataclass(frozen=True)
class Comparison:
    """A value of one run, and its difference from that of the run with all terms.

    Attributes:
        value: mean over the seeds; None if it was not measured.
        difference: mean difference over the seeds that both runs have; None for the run with all
            terms itself, and where one of the two was not measured.
    """

    value: Estimate | None
    difference: Estimate | None = None

    @property
    def verdict(self) -> str | None:
        """`"higher"`, `"lower"` or `"no visible effect"`; None without an interval.

        There is an effect only if the 95 % interval of the difference excludes 0.
        """
        if self.difference is None or self.difference.margin is None:
            return None
        if not self.difference.differs_from_zero:
            return NO_EFFECT
        return "higher" if self.difference.mean > 0 else "lower"

    def to_dict(self) -> dict[str, Any]:
        """Numbers and verdict, for a JSON file."""
        return {**asdict(self), "verdict": self.verdict}


def compare(by_seed: BySeed, full: BySeed | None) -> Comparison:
    """Compare the values of a run, by seed, with those of the run with all terms."""
    value = estimate([each for each in by_seed.values() if each is not None])
    differences = [
        each - other
        for seed, each in by_seed.items()
        if each is not None and (other := (full or {}).get(seed)) is not None
    ]
    return Comparison(value, estimate(differences))


def conclusions(effects: Mapping[str, Mapping[str, Comparison]]) -> list[str]:
    """Sentences about an ablation: the verdict on each run without a term, or why there is none.

    They are about the held-out loss or reward, and the held-out value of the term, or of the
    reward, that was left out.

    Args:
        effects: comparison of each held-out value, by run and quantity.
    """
    differences = [
        each.difference for own in effects.values() for each in own.values() if each.difference
    ]
    if not differences:
        return []
    if all(each.margin is None for each in differences):
        return [_ONE_SEED]
    count = max(each.count for each in differences)
    sentences = [
        f"{run}: {'; '.join(parts)}."
        for run, own in effects.items()
        if (
            parts := [
                _verdict(name, each)
                for name, each in own.items()
                if _is_about(run, name, own) and each.verdict is not None
            ]
        )
    ]
    return [*sentences, _INTERVALS.format(count=count)]


def reward_quantity(name: str) -> str:
    """Name of the held-out mean of one reward, apart from a term of the same name."""
    return f"{_ONE_REWARD}{name}"


def is_reward(quantity: str) -> bool:
    """Whether a quantity is a reward, or their sum: higher is better."""
    return quantity == REWARD or quantity.startswith(_ONE_REWARD)


def _is_about(run: str, quantity: str, own: Mapping[str, Comparison]) -> bool:
    if quantity in (LOSS, REWARD) or run == f"without {quantity}":
        return True
    terms = [each for each in own if each not in (LOSS, REWARD) and not is_reward(each)]
    return run == "none" and terms == [quantity]


def _verdict(quantity: str, comparison: Comparison) -> str:
    difference = comparison.difference
    assert difference is not None  # noqa: S101 - there is a verdict
    margin = f"± {difference.margin:.2g}"
    if comparison.verdict == NO_EFFECT:
        return f"{NO_EFFECT} on {quantity} ({difference.mean:+.2g} {margin})"
    return f"{quantity} {comparison.verdict} by {abs(difference.mean):.2g} {margin}"


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Number t with P(|T| <= t) = `confidence`, for Student's T with these degrees of freedom.

    Example:
        >>> [round(t_quantile(degrees), 3) for degrees in (1, 2, 9)]
        [12.706, 4.303, 2.262]
    """
    low, high = 0.0, math.pi / 2  # of the angle θ with t = √n tan θ, in which P is monotonic
    for _ in range(60):  # halves the interval below the spacing of doubles
        middle = (low + high) / 2
        low, high = (middle, high) if _central_mass(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _central_mass(theta: float, degrees: int) -> float:
    """P(|T| <= √n tan θ) with n degrees of freedom: Abramowitz & Stegun, 26.7.3 and 26.7.4.

    n odd:  (2/π) (θ + sin θ · (cos θ + 2/3 cos³θ + (2·4)/(3·5) cos⁵θ + … up to cos^(n-2) θ))
    n even: sin θ · (1 + 1/2 cos²θ + (1·3)/(2·4) cos⁴θ + … up to cos^(n-2) θ)
    """
    odd = degrees % 2
    cosine = math.cos(theta)
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    total *= math.sin(theta)
    return 2 / math.pi * (theta + total) if odd else total
