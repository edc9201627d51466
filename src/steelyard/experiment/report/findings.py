"""What a run's metrics say: of each term, and in a few sentences of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.experiment.marks import dominates, fights
from steelyard.experiment.report.folders import Run


@dataclass(frozen=True)
class Change:
    """A number in the beginning and in the end.

    Attributes:
        first: its mean over the first steps; batches differ, so that one says little.
        last: its mean over the last steps.
        over: how many steps each mean is of: a quarter of them.
    """

    first: float
    last: float
    over: int = 1

    @property
    def relative(self) -> float | None:
        """The change in parts of the first value; None where that is 0."""
        return (self.last - self.first) / abs(self.first) if self.first else None


@dataclass(frozen=True)
class TermFinding:
    """What a run shows of one term.

    Attributes:
        name: the term, `"base"` for the base loss.
        value: its raw value.
        weight: its last weight; None for the base loss.
        contribution: what it adds to the loss, on average over all steps.
        grad_norm: its mean weighted gradient norm; None without a gradient.
        share: the mean share of its norm in the sum of all norms.
        cosine: the mean cosine of its gradient to the base loss's.
        seconds: the mean time of a call.
        steps: at how many steps it ran.
        marks: what to look at: `"dominates"`, `"fights the base loss"`, `"no gradient"`.
    """

    name: str
    value: Change | None = None
    weight: float | None = None
    contribution: float | None = None
    grad_norm: float | None = None
    share: float | None = None
    cosine: float | None = None
    seconds: float | None = None
    steps: int = 0
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """What a run shows.

    Attributes:
        steps: how many steps there are; `planned` how many the config asks for.
        loss: the total loss.
        held_out: the held-out loss; None if it was not measured.
        seconds: the time of all steps.
        tracked: whether gradient norms are there.
        base: the base loss.
        terms: the regularizers.
    """

    steps: int
    planned: int | None
    loss: Change | None
    held_out: Change | None
    seconds: float | None
    tracked: bool
    base: TermFinding
    terms: Sequence[TermFinding] = field(default=())

    def extreme(self, what: str, pick: Callable[..., TermFinding | None]) -> TermFinding | None:
        """The term with the most or the least of a number, among those that have it."""
        known = [term for term in self.terms if getattr(term, what) is not None]
        return pick(known, key=lambda term: getattr(term, what), default=None)

    def marked(self, mark: str) -> list[TermFinding]:
        """The terms with a mark, those first that have the most of it."""
        strength = {
            "dominates": lambda term: -(term.share or 0.0),
            "fights the base loss": lambda term: term.cosine or 0.0,
        }.get(mark, lambda _: 0.0)
        return sorted((term for term in self.terms if mark in term.marks), key=strength)


def findings(run: Run) -> Findings:
    """What the metrics of a run say."""
    steps = (run.config.get("train") or {}).get("steps")
    tracked = bool(run.series("base_loss/grad_norm")[1])
    seconds = run.series("seconds")[1]
    return Findings(
        steps=len(run.rows),
        planned=steps if isinstance(steps, int) else None,
        loss=_change(run, "loss_total"),
        held_out=_change(run, "held_out/loss", part=0),
        seconds=math.fsum(seconds) if seconds else None,
        tracked=tracked,
        base=TermFinding(
            "base",
            value=_change(run, "base_loss/value"),
            contribution=_mean(run.series("base_loss/value")[1]),
            grad_norm=_mean(run.series("base_loss/grad_norm")[1]),
            share=_mean([each for each in shares(run)["base"] if each is not None]),
            steps=len(run.series("base_loss/value")[1]),
        ),
        terms=[_term(run, name, tracked=tracked) for name in run.terms],
    )


def shares(run: Run) -> dict[str, list[float | None]]:
    """Each term's part in the sum of all weighted gradient norms, step by step.

    Norms are added although gradients may cancel: shares then always add up to 1.
    """
    keys = {"base": "base_loss/grad_norm"} | {
        name: f"regularizers/{name}/grad_norm_weighted" for name in run.terms
    }
    found: dict[str, list[float | None]] = {name: [] for name in keys}
    for row in run.rows:
        norms = {name: row[key] for name, key in keys.items() if row.get(key) is not None}
        whole = math.fsum(norms.values())
        for name, values in found.items():
            norm = norms.get(name)
            values.append(norm / whole if norm is not None and whole > 0 else None)
    return found


def cosine_key(run: Run, a: str, b: str) -> str:
    """The metric with the cosine of two terms, whichever comes first in its name."""
    forward, backward = f"cosines/{a}/{b}", f"cosines/{b}/{a}"
    return backward if any(backward in row for row in run.rows) else forward


def _term(run: Run, name: str, *, tracked: bool) -> TermFinding:
    at = f"regularizers/{name}"
    norms = run.series(f"{at}/grad_norm_weighted")[1]
    pull = run.series(f"{at}/grad_norm")[1]
    share = _mean([each for each in shares(run)[name] if each is not None])
    cosine = _mean(run.series(cosine_key(run, "base", name))[1]) if any(pull) else None
    marks = {
        "dominates": dominates(share),
        "fights the base loss": fights(cosine),
        "no gradient": tracked and not any(pull),
    }
    return TermFinding(
        name,
        value=_change(run, f"{at}/value"),
        weight=_last(run, f"{at}/weight"),
        contribution=_mean(run.series(f"{at}/contribution")[1]),
        grad_norm=_mean(norms),
        share=share,
        cosine=cosine,
        seconds=_mean(run.series(f"{at}/duration")[1]),
        steps=len(run.series(f"{at}/value")[1]),
        marks=tuple(mark for mark, there in marks.items() if there),
    )


def _change(run: Run, key: str, part: float = 0.25) -> Change | None:
    values = [value for value in run.series(key)[1] if math.isfinite(value)]
    if not values:
        return None
    over = max(1, int(part * len(values)))
    first, last = (math.fsum(some) / over for some in (values[:over], values[-over:]))
    return Change(first, last, over)


def _last(run: Run, key: str) -> float | None:
    values = run.series(key)[1]
    return values[-1] if values else None


def _mean(values: Sequence[Any]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None
