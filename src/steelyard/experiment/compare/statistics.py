"""Means over seeds, and differences paired by seed: intervals, and tests by the method of Holm.

Runs with the same seed share their initial weights and the order of their data. Much of what
varies from seed to seed is therefore the same in both runs of a pair, and cancels in their
difference; the interval of the mean difference is narrower than those of the two means.

Each interval holds on its own, and a table has many: with eleven comparisons and no effect at all,
43 % of the tables would have an interval that excludes 0. Verdicts are therefore those of Student's
t-test of each difference, adjusted for all comparisons of the table by Holm (1979): the chance that
a table without an effect has any verdict is at most 5 %.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypeAlias

BySeed: TypeAlias = Mapping[Any, float | None]  # `Any`: the keys of a mapping are invariant
Effects: TypeAlias = Mapping[str, Mapping[str, "Comparison"]]  # by run and quantity

CONFIDENCE = 0.95
LOSS, REWARD = "held-out loss", "held-out reward"
WITH_TERMS, WITHOUT_TERMS = "all", "none"  # names of the two runs that every ablation has
_ONE_REWARD = "reward "  # begins the quantity of one of the rewards
NOT_RESOLVED: Final = "not resolved"
_MAX_SEEDS = 100  # that are suggested to resolve a difference
_ONE_SEED = (
    "These are differences between single runs. Other seeds may give others, so there is no "
    "verdict: --seeds 3 adds runs with two more seeds, and intervals."
)
_INTERVALS = (
    "Differences are those from the run with all terms: means of {count} seeds, paired by seed, "
    "with the 95 % interval by Student's t. There is a verdict only where it holds for all {tests} "
    "comparisons of this table together, with 95 % confidence (t-tests, adjusted by Holm)."
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
    def p_value(self) -> float | None:
        """Two-sided p of the t-test of mean 0, not adjusted; None if there is no interval."""
        if self.margin is None:
            return None
        if not self.margin:
            return 0.0 if self.mean else 1.0
        return p_of(t_quantile(self.count - 1) * self.mean / self.margin, self.count - 1)

    def seeds_to_resolve(self, level: float) -> int | None:
        """Smallest number of values with p <= `level`, at this mean and standard deviation.

        None without an interval, for a mean of 0, or if more than 100 are needed.

        Example:
            >>> estimate([1.0, 2.0, 3.0]).seeds_to_resolve(0.05)
            4
        """
        if self.margin is None or not self.mean:
            return None
        # t = mean / (s / √n), and margin = t_quantile(count - 1) · s / √count.
        ratio = self.margin / abs(self.mean) / t_quantile(self.count - 1) * math.sqrt(self.count)
        for count in range(2, _MAX_SEEDS + 1):
            if ratio * t_quantile(count - 1, 1 - level) <= math.sqrt(count):
                return count
        return None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and interval of values that are independent and roughly normal.

    The margin is t · s / √n: s is the standard deviation with n - 1 in its denominator, t the
    0.975 quantile of Student's distribution with n - 1 degrees of freedom.

    Returns:
        The estimate; None without values, or if one is not finite.

    Example:
        >>> mean = estimate([1.0, 2.0, 3.0])
        >>> mean.mean, round(mean.margin, 3), round(mean.p_value, 3)
        (2.0, 2.484, 0.074)
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
        p_value: p of the difference, adjusted for all comparisons of the table; None where no
            verdict is asked for.
        seeds_to_resolve: number of seeds that would give a verdict, if the mean and the standard
            deviation of the differences stay; None if there is one, or if no number up to 100
            would.
    """

    value: Estimate | None
    difference: Estimate | None = None
    p_value: float | None = None
    seeds_to_resolve: int | None = None

    @property
    def verdict(self) -> Literal["higher", "lower", "not resolved"] | None:
        """Verdict at an adjusted p of 0.05; None without a p."""
        if self.difference is None or self.p_value is None:
            return None
        if self.p_value > 1 - CONFIDENCE:
            return NOT_RESOLVED
        return "higher" if self.difference.mean > 0 else "lower"

    @property
    def is_resolved(self) -> bool:
        """Return whether the verdict is `"higher"` or `"lower"`."""
        return self.verdict not in (None, NOT_RESOLVED)

    def to_dict(self) -> dict[str, Any]:
        """Numbers and verdict, for a JSON file."""
        return {**asdict(self), "verdict": self.verdict}


def compare(by_seed: BySeed, full: BySeed | None) -> Comparison:
    """Compare the values of a run, by seed, with those of the run with all terms."""
    value = estimate([number for number in by_seed.values() if number is not None])
    differences = [
        number - other
        for seed, number in by_seed.items()
        if number is not None and (other := (full or {}).get(seed)) is not None
    ]
    return Comparison(value, estimate(differences))


def add_verdicts(effects: Effects) -> dict[str, dict[str, Comparison]]:
    """Test the comparisons of an ablation that there are conclusions about, all together.

    These are the held-out loss or reward of each run, and the held-out value of the term or reward
    that it leaves out. The others are shown, and not tested: each further test would make all
    others weaker.

    Args:
        effects: comparison of each held-out value, by run and quantity.

    Returns:
        The same comparisons, those that are tested with `p_value` and `seeds_to_resolve`.
    """
    p_values = {
        (run, name): p
        for run, own in effects.items()
        for name, comparison in own.items()
        if _is_about(run, name, own)
        and comparison.difference is not None
        and (p := comparison.difference.p_value) is not None
    }
    adjusted = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    # The level of the smallest p that is not resolved, and a little strict for the others.
    level = (1 - CONFIDENCE) / max(1, sum(p > 1 - CONFIDENCE for p in adjusted.values()))

    def tested(key: tuple[str, str], comparison: Comparison) -> Comparison:
        p, difference = adjusted.get(key), comparison.difference
        if p is None or difference is None:
            return comparison
        seeds = difference.seeds_to_resolve(level) if p > 1 - CONFIDENCE else None
        return replace(comparison, p_value=p, seeds_to_resolve=seeds)

    return {
        run: {name: tested((run, name), comparison) for name, comparison in own.items()}
        for run, own in effects.items()
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number, by the step-down method of Holm.

    With p₁ ≤ … ≤ pₘ the adjusted ones are maxⱼ≤ᵢ min(1, (m − j + 1) pⱼ). To reject where they are
    at most 0.05 rejects any true hypothesis with a probability of at most 0.05.

    Reference: Holm (1979), "A simple sequentially rejective multiple test procedure".

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def conclusions(effects: Effects) -> list[str]:
    """Sentences about an ablation: the verdict on each run without a term, or why there is none.

    They are about the held-out loss or reward, and the held-out value of the term, or of the
    reward, that was left out. If the only runs are those with all terms and with none, the first
    is `effect_of_terms`.

    Args:
        effects: comparison of each held-out value, by run and quantity.
    """
    effects = add_verdicts(effects)
    differences = [
        comparison.difference
        for own in effects.values()
        for comparison in own.values()
        if comparison.difference
    ]
    if not differences:
        return []
    is_baseline = has_both(effects) and len(effects) == len((WITH_TERMS, WITHOUT_TERMS))
    sentences = [effect_of_terms(effects)] if is_baseline else []
    if all(difference.margin is None for difference in differences):
        return [*sentences, _ONE_SEED]
    count = max(difference.count for difference in differences)
    tests = 0
    for run, own in effects.items():
        tested = {name: c for name, c in own.items() if c.verdict is not None}
        tests += len(tested)
        verdicts = [
            _verdict(name, c)
            for name, c in tested.items()
            if not (is_baseline and name in (LOSS, REWARD))
        ]
        if verdicts:
            sentences.append(f"{run}: {'; '.join(verdicts)}.")
    return [*sentences, _INTERVALS.format(count=count, tests=tests)]


def has_both(effects: Effects) -> bool:
    """Return whether there are results of the runs with all terms and with none."""
    return {WITH_TERMS, WITHOUT_TERMS} <= effects.keys()


def effect_of_terms(effects: Effects) -> str:
    """Sentences on the runs with all terms and with none: the held-out loss or reward, the terms.

    Args:
        effects: comparison of each held-out value, by run and quantity, with their verdicts.
    """
    full, other = effects[WITH_TERMS], effects[WITHOUT_TERMS]
    return " ".join(filter(None, (_effect_on_goal(full, other), _values_of_terms(full, other))))


def _values_of_terms(full: Mapping[str, Comparison], other: Mapping[str, Comparison]) -> str:
    """Sentence on the held-out values of the terms; what a term is for, the loss does not show."""
    values = []
    for name in full:
        here, there = full[name].value, other[name].value if name in other else None
        if name not in (LOSS, REWARD) and not is_reward(name) and here and there:
            values.append(f"{name} is {here.mean:.3g} with the terms, {there.mean:.3g} without")
    return f"On held-out data {'; '.join(values)}." if values else ""


def _effect_on_goal(full: Mapping[str, Comparison], other: Mapping[str, Comparison]) -> str:
    quantity = REWARD if REWARD in full else LOSS
    value, comparison = full[quantity].value, other[quantity]
    if value is None or comparison.value is None or comparison.difference is None:
        return f"The {quantity} was not measured with and without the terms."
    change, both = comparison.difference, f"{value.mean:.4g} with the terms"
    both += f", {comparison.value.mean:.4g} without"
    if change.margin is None:
        return f"The {quantity} is {both}: {NOT_RESOLVED} with one seed (--seeds 3 adds two)."
    if not comparison.is_resolved:
        return f"The {quantity} is {both}: {_unresolved(-change.mean, comparison)}."
    verb = "lowered" if change.mean > 0 else "raised"  # the change is that without the terms
    size = f"{abs(change.mean):.2g} ± {change.margin:.2g}"
    return f"The terms {verb} the {quantity} by {size}: {both}, means of {change.count} seeds."


def reward_quantity(name: str) -> str:
    """Name of the held-out mean of one reward, apart from a term of the same name."""
    return f"{_ONE_REWARD}{name}"


def is_reward(quantity: str) -> bool:
    """Return whether a quantity is a reward, or their sum: higher is better."""
    return quantity == REWARD or quantity.startswith(_ONE_REWARD)


def _is_about(run: str, quantity: str, own: Mapping[str, Comparison]) -> bool:
    if quantity in (LOSS, REWARD) or run == f"without {quantity}":
        return True
    terms = [name for name in own if name not in (LOSS, REWARD) and not is_reward(name)]
    return run == WITHOUT_TERMS and terms == [quantity]


def _verdict(quantity: str, comparison: Comparison) -> str:
    difference = comparison.difference
    assert difference is not None  # noqa: S101 - there is a verdict
    if comparison.verdict == NOT_RESOLVED:
        return f"{quantity} {_unresolved(difference.mean, comparison)}"
    size = f"{abs(difference.mean):.2g} ± {difference.margin:.2g}"
    return f"{quantity} {comparison.verdict} by {size}"


def _unresolved(mean: float, comparison: Comparison) -> str:
    """Words on a difference without a verdict; `mean` is it, or the same with the other sign."""
    difference = comparison.difference
    assert difference is not None  # noqa: S101 - there is one
    seeds = comparison.seeds_to_resolve
    more = f"more than {_MAX_SEEDS}" if seeds is None else f"about {seeds}"
    cure = f"; {more} seeds would" if mean else ""
    size = f"{mean:+.2g} ± {difference.margin:.2g}"
    return f"{NOT_RESOLVED} with {difference.count} seeds ({size}{cure})"


def p_of(t: float, degrees: int) -> float:
    """P(|T| > |t|) for Student's T with these degrees of freedom.

    Example:
        >>> round(p_of(12.706, 1), 4), round(p_of(-2.262, 9), 4)
        (0.05, 0.05)
    """
    return max(0.0, 1.0 - _central_mass(math.atan(abs(t) / math.sqrt(degrees)), degrees))


@functools.lru_cache(maxsize=4096)
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
