"""What a run's metrics say: of each term, and in a few sentences of the whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.experiment.flags import DOMINATES, FIGHTS, flags_of
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.step_metrics import gradient_shares, short_reason, skipped_terms


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
        flags: see `steelyard.experiment.flags`.
        skipped: at how many steps it failed and was dropped, by reason, the most frequent first.
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
    flags: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)


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

    def flagged(self, flag: str) -> list[TermFinding]:
        """The terms with a flag, those first to which it applies most."""
        strength = {
            DOMINATES: lambda term: -(term.share or 0.0),
            FIGHTS: lambda term: term.cosine or 0.0,
        }.get(flag, lambda _: 0.0)
        return sorted((term for term in self.terms if flag in term.flags), key=strength)

    @property
    def skipping(self) -> list[TermFinding]:
        """The terms that were skipped at some steps."""
        return [term for term in self.terms if term.skipped]


def findings(run: LoadedRun) -> Findings:
    """What the metrics of a run say."""
    steps = (run.config.get("train") or {}).get("steps")
    tracked = bool(run.series("base_loss/grad_norm")[1])
    seconds = run.series("seconds")[1]
    parts = {name: _mean([each for each in every if each is not None])
             for name, every in shares(run).items()}  # fmt: skip
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
            share=parts["base"],
            steps=len(run.series("base_loss/value")[1]),
        ),
        terms=[_term(run, name, parts[name]) for name in run.terms],
    )


def shares(run: LoadedRun) -> dict[str, list[float | None]]:
    """Each term's part in the sum of all weighted gradient norms, step by step."""
    names = run.terms
    by_step = [gradient_shares(row, names) for row in run.rows]
    return {name: [each[name] for each in by_step] for name in ("base", *names)}


def cosine_key(run: LoadedRun, a: str, b: str) -> str:
    """The metric with the cosine of two terms, whichever comes first in its name."""
    forward, backward = f"cosines/{a}/{b}", f"cosines/{b}/{a}"
    return backward if any(backward in row for row in run.rows) else forward


def _term(run: LoadedRun, name: str, share: float | None) -> TermFinding:
    at = f"regularizers/{name}"
    norms = run.series(f"{at}/grad_norm")[1]
    cosine = _mean(run.series(cosine_key(run, "base", name))[1]) if any(norms) else None
    return TermFinding(
        name,
        value=_change(run, f"{at}/value"),
        weight=_last(run, f"{at}/weight"),
        contribution=_mean(run.series(f"{at}/contribution")[1]),
        grad_norm=_mean(run.series(f"{at}/grad_norm_weighted")[1]),
        share=share,
        cosine=cosine,
        seconds=_mean(run.series(f"{at}/duration")[1]),
        steps=len(run.series(f"{at}/value")[1]),
        flags=flags_of(
            tracked=any("base_loss/grad_norm" in row and f"{at}/value" in row for row in run.rows),
            weight=_other_than_zero(run.series(f"{at}/weight")[1]) or 0.0,
            grad_norm=_other_than_zero(norms),
            share=share,
            cosine=cosine,
        ),
        skipped=_skipped(run, name),
    )


def _skipped(run: LoadedRun, name: str) -> dict[str, int]:
    every = (skipped_terms(row).get(name) for row in run.rows)
    counted = Counter(short_reason(name, reason) for reason in every if reason is not None)
    return dict(counted.most_common())


def _other_than_zero(values: Sequence[float]) -> float | None:
    """The first value that is not 0, or 0 if all are; None without any."""
    return next(filter(None, values), 0.0 if values else None)


def _change(run: LoadedRun, key: str, part: float = 0.25) -> Change | None:
    values = [value for value in run.series(key)[1] if math.isfinite(value)]
    if not values:
        return None
    over = max(1, int(part * len(values)))
    first, last = (math.fsum(some) / over for some in (values[:over], values[-over:]))
    return Change(first, last, over)


def _last(run: LoadedRun, key: str) -> float | None:
    values = run.series(key)[1]
    return values[-1] if values else None


def _mean(values: Sequence[Any]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None
