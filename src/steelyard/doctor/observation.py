"""`Observation`: the metrics of one step as rules read them, and the memory of a rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

from steelyard.doctor.facts import Facts, RewardFacts, TermFacts
from steelyard.output.step_metrics import reward_names, terms_that_ran
from steelyard.spec.checks import is_finite

# A larger number is no result of training, and products of it would overflow.
LARGEST = 1e100

State: TypeAlias = dict[str, list[float]]


class Memory:
    """Numbers that one rule keeps from step to step: short lists, by key.

    Attributes:
        lists: the lists, to save.
    """

    def __init__(self, lists: State | None = None) -> None:
        self.lists: State = {} if lists is None else lists

    def last(self, key: str, number: float, count: int) -> list[float]:
        """Append a number; return the last `count` of this key, the new one at the end."""
        numbers = self.lists.setdefault(key, [])
        numbers.append(number)
        if len(numbers) > count:
            del numbers[:-count]
        return numbers

    def first(self, key: str, number: float, count: int = 1) -> list[float]:
        """Append a number unless there are `count`; return the first `count` of this key."""
        numbers = self.lists.setdefault(key, [])
        if len(numbers) < count:
            numbers.append(number)
        return numbers

    def replace(self, key: str, numbers: list[float]) -> None:
        """Keep these numbers as those of this key."""
        self.lists[key] = numbers

    def holds(self, key: str) -> bool:
        """Whether there is a number of this key."""
        return bool(self.lists.get(key))

    def mean_of_first(self, key: str, number: float, count: int = 3) -> float:
        """Mean of the first `count` numbers of this key, of which this is one if they are fewer."""
        numbers = self.first(key, number, count)
        return math.fsum(numbers) / len(numbers)


def read_number(metrics: Mapping[str, Any], key: str) -> float | None:
    """Number of a metric; None if it is missing, not a number, not finite, or above `LARGEST`."""
    value = metrics.get(key)
    # Most of what rules read is missing, or a plain float; NaN is in no range.
    if value is None:
        return None
    if type(value) is float:
        return value if -LARGEST <= value <= LARGEST else None
    return float(value) if is_finite(value) and abs(value) <= LARGEST else None


def is_broken_number(metrics: Mapping[str, Any], key: str) -> bool:
    """Whether a metric is a number and not finite, or above `LARGEST`."""
    value = metrics.get(key)
    if type(value) is float:
        return not -LARGEST <= value <= LARGEST
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and read_number(metrics, key) is None


@dataclass(frozen=True)
class TermKeys:
    """Keys of the metrics of one term; `subject` is what they begin with."""

    subject: str
    value: str
    contribution: str
    weight: str
    bound: str
    violation: str
    grad_norm: str
    grad_norm_weighted: str
    grad_space: str
    duration: str
    progress: str
    cosine: str

    @classmethod
    @lru_cache(maxsize=256)  # a run reads those of the same few terms at every step
    def of(cls, name: str) -> TermKeys:
        """Keys of the term of this name."""
        subject = f"regularizers/{name}"
        ends = (field.name for field in fields(cls))
        keys = {end: f"{subject}/{end}" for end in ends}
        return cls(**(keys | {"subject": subject, "cosine": f"cosines/base/{name}"}))


class TermStep(NamedTuple):
    """Numbers of one term at one step; None where a number is missing or not finite.

    Attributes:
        name: name of the term.
        subject: subject of findings about it.
        facts: what is declared of it.
        value: value before the weight.
        weight: weight, or the multiplier of a bound.
        bound: the bound of the value; None for a term with a weight.
        violation: by how much the value is beyond the bound.
        grad_norm: norm of its gradient before the weight.
        has_gradient: whether the metrics have a norm, finite or not.
        share: weighted norm divided by the sum of the weighted norms in its space, with that of
            the base loss; None in another space than that of the base loss.
        cosine: cosine to the gradient of the base loss; None where one of them is 0.
        cancelled: fraction of the gradient of the base loss that its weighted gradient cancels.
        seconds: duration of its call.
        progress: change of its value by the update of this step, where it was measured.
    """

    name: str
    subject: str
    facts: TermFacts
    value: float | None
    weight: float | None
    bound: float | None
    violation: float | None
    grad_norm: float | None
    has_gradient: bool
    share: float | None
    cosine: float | None
    cancelled: float | None
    seconds: float | None
    progress: float | None

    @property
    def is_bounded(self) -> bool:
        """Whether it has a bound instead of a weight."""
        return self.bound is not None or bool(self.facts.bound)

    def weight_for(self, wanted: float) -> float | None:
        """Weight at which its share would be `wanted`; None if that is not known.

        With the share s at weight w, the other norms are w (1 - s) / s in units of its own norm.
        """
        share, weight = self.share, self.weight
        if not share or not weight or share >= 1:
            return None
        return weight * wanted / (1 - wanted) * (1 - share) / share


@dataclass(frozen=True)
class RewardStep:
    """Numbers of one reward at one step; None where a number is missing or not finite.

    Attributes:
        name: name of the reward.
        facts: what is declared of it.
        mean: mean over the answers.
        std: standard deviation over the answers.
        weight: its weight; 0 if it is only measured.
        failed: number of answers for which it failed.
        no_signal: fraction of the groups in which all answers have the same reward.
        seconds: time it took.
    """

    name: str
    facts: RewardFacts
    mean: float | None
    std: float | None
    weight: float
    failed: float
    no_signal: float | None
    seconds: float | None

    @property
    def subject(self) -> str:
        """Subject of findings about it."""
        return f"rewards/{self.name}"


@dataclass(frozen=True)
class Observation:
    """The metrics of one step, and the facts.

    Attributes:
        step: number of the step.
        metrics: of the step, under the keys of `metrics.jsonl`.
        facts: declared facts of the run.
        updated: whether an update with a learning rate above 0 was made before this step.
    """

    step: int
    metrics: Mapping[str, Any]
    facts: Facts
    updated: bool

    def number(self, key: str) -> float | None:
        """Number of a metric; None if it is missing or not finite."""
        return read_number(self.metrics, key)

    @cached_property
    def tracked(self) -> bool:
        """Whether gradient norms were tracked at this step."""
        return self.number("base_loss/grad_norm") is not None

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of this step, or else the declared one."""
        rate = self.number("optim/learning_rate")
        return self.facts.learning_rate if rate is None else rate

    @cached_property
    def terms(self) -> list[TermStep]:
        """The terms that ran, by name."""
        names = sorted(terms_that_ran(self.metrics))
        norms = {name: self._weighted_norm(name) for name in ("base", *names)}
        spaces = {name: self._space(name) for name in norms}
        total = math.fsum(
            norm for name, norm in norms.items() if norm and spaces[name] == spaces["base"]
        )
        return [self._term(name, norms, total, spaces) for name in names]

    @cached_property
    def rewards(self) -> list[RewardStep]:
        """The rewards, by name."""
        return [
            RewardStep(
                name,
                self.facts.reward(name),
                mean=self.number(f"rewards/{name}/mean"),
                std=self.number(f"rewards/{name}/std"),
                weight=self.number(f"rewards/{name}/weight") or 0.0,
                failed=self.number(f"rewards/{name}/failed") or 0.0,
                no_signal=self.number(f"rewards/{name}/no_signal"),
                seconds=self.number(f"rewards/{name}/seconds"),
            )
            for name in sorted(reward_names(self.metrics))
        ]

    def _term(
        self, name: str, norms: Mapping[str, float | None], total: float, spaces: Mapping[str, str]
    ) -> TermStep:
        metrics, keys = self.metrics, TermKeys.of(name)
        base, norm = norms["base"], norms[name]
        grad_norm = read_number(metrics, keys.grad_norm)
        compared = base is not None and norm is not None and spaces[name] == spaces["base"]
        share = norm / total if compared and norm is not None and total > 0 else None
        cosine = read_number(metrics, keys.cosine) if base and grad_norm and compared else None
        return TermStep(
            name,
            keys.subject,
            self.facts.term(name),
            value=read_number(metrics, keys.value),
            weight=read_number(metrics, keys.weight),
            bound=read_number(metrics, keys.bound),
            violation=read_number(metrics, keys.violation),
            grad_norm=grad_norm,
            has_gradient=keys.grad_norm in metrics,
            share=share,
            cosine=cosine,
            cancelled=-cosine * norm / base if cosine is not None and norm and base else None,
            seconds=read_number(metrics, keys.duration),
            progress=read_number(metrics, keys.progress),
        )

    def _weighted_norm(self, name: str) -> float | None:
        if name == "base":
            return self.number("base_loss/grad_norm")
        return self.number(TermKeys.of(name).grad_norm_weighted)

    def _space(self, name: str) -> str:
        is_base = name == "base"
        key = "base_loss/grad_space" if is_base else TermKeys.of(name).grad_space
        written = self.metrics.get(key)
        if isinstance(written, str):
            return written
        declared = "" if name == "base" else self.facts.term(name).space
        # With respect to the parameters all terms are compared, whatever they read.
        whole = self.facts.grad_space == "parameters"
        return self.facts.grad_space if whole else declared or self.facts.grad_space
