"""`Rule`: one thing that can be wrong, and how long it must be so before it is said.

A rule judges subjects, such as terms, at a step: well, or not well with a `Diagnosis`. A subject
that it does not judge, since a metric is missing or the rule does not apply, keeps its state. The
hysteresis is here and nowhere else: a finding begins when `begin[0]` of the last `begin[1]`
judgements were "not well", and ends after `end` judgements in a row that were "well".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from steelyard.doctor.finding import Finding, Severity
from steelyard.doctor.observation import Memory, Observation
from steelyard.errors import StateError

LARGEST_DIVISOR = 10  # of a learning rate, in one piece of advice


def percent(fraction: float, digits: int = 0) -> str:
    """A fraction in percent.

    Example:
        >>> percent(0.305), percent(0.005, digits=2)
        ('30 %', '0.50 %')
    """
    return f"{100 * fraction:.{digits}f} %"


def short_number(number: float) -> str:
    """A number with three significant digits, or all those before the point.

    Example:
        >>> short_number(0.12345), short_number(2320.4), short_number(1.5e7)
        ('0.123', '2,320', '1.5e+07')
    """
    return f"{number:,.0f}" if 1e3 <= abs(number) < 1e6 else f"{number:.3g}"  # noqa: PLR2004


def smaller_rate(now: Observation, divisor: float = LARGEST_DIVISOR) -> str:
    """Advice to divide the learning rate, by 2 to 10, with the numbers where they are known."""
    whole = round(min(max(2, divisor), LARGEST_DIVISOR))  # it may be infinite
    rate = now.learning_rate
    numbers = f" (from {rate:.2g} to {rate / whole:.2g})" if rate else ""
    return f"divide the learning rate by {whole}{numbers}"


@dataclass(frozen=True)
class Diagnosis:
    """Why a subject is not well at a step; the fields are those of a `Finding`.

    `severity` replaces that of the rule.
    """

    what: str
    evidence: str
    cure: str
    cause: str = ""
    severity: Severity | None = None


# Pairs of a subject and a diagnosis, None if it is well.
Judgements: TypeAlias = Iterator[tuple[str, Diagnosis | None]]
Judge: TypeAlias = Callable[[Observation, Memory], Judgements]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: name of the rule.
        severity: of its findings, unless a diagnosis has its own.
        when: when it judges "not well", in words, for the documentation.
        cure: what to change, in words, for the documentation.
        judge: judges the subjects of a step, with the numbers that it keeps itself.
        begin: how many of how many judgements must be "not well" for a finding to begin.
        end: number of judgements in a row that must be "well" for it to end.
    """

    name: str
    severity: Severity
    when: str
    cure: str
    judge: Judge
    begin: tuple[int, int] = (1, 1)
    end: int = 1


def rule(
    name: str,
    severity: Severity,
    *,
    when: str,
    cure: str,
    begin: tuple[int, int] = (1, 1),
    end: int = 1,
) -> Callable[[Judge], Rule]:
    """Make a `Rule` of the function that judges."""
    return lambda judge: Rule(name, severity, when, cure, judge, begin, end)


@dataclass
class Course:
    """Judgements of one rule on one subject so far.

    Attributes:
        window: the last judgements, True for "not well".
        well: number of judgements "well" in a row, the last ones.
        finding: the finding that has begun and not ended.
    """

    window: list[bool] = field(default_factory=list)
    well: int = 0
    finding: Finding | None = None

    def judged(
        self, rule: Rule, subject: str, diagnosis: Diagnosis | None, step: int
    ) -> Finding | None:
        """Add a judgement; return the finding if it begins or ends with it."""
        count, of = rule.begin
        window, finding = self.window, self.finding
        window.append(diagnosis is not None)
        while len(window) > of:
            window.pop(0)
        self.well = 0 if diagnosis else self.well + 1
        if diagnosis is None:
            if finding is None or self.well < rule.end:
                return None
            self.finding, self.window = None, []
            return replace(finding, ended=step)
        if finding is None and sum(window) < count:
            return None
        # While it lasts, the numbers are those of the last step at which it was not well.
        self.finding = Finding(
            rule.name,
            subject,
            diagnosis.severity or rule.severity,
            diagnosis.what,
            diagnosis.evidence,
            diagnosis.cause,
            diagnosis.cure,
            step if finding is None else finding.step,
        )
        return self.finding if finding is None else None

    def state_dict(self) -> dict[str, Any]:
        """State to save."""
        finding = None if self.finding is None else self.finding.to_dict()
        return {"window": list(self.window), "well": self.well, "finding": finding}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Course:
        """The course whose `state_dict` this is.

        Raises:
            StateError: it is not that.
        """
        keys = ("window", "well", "finding")
        if (
            not isinstance(state, Mapping)
            or set(state) != set(keys)
            or type(state["well"]) is not int
            or not isinstance(state["window"], list)
            or not all(isinstance(judgement, bool) for judgement in state["window"])
        ):
            raise StateError(f"the state of a rule must hold {', '.join(keys)}, got {state!r}.")
        finding = state["finding"]
        return cls(
            list(state["window"]),
            state["well"],
            None if finding is None else Finding.from_dict(finding),
        )
