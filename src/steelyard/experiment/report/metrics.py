"""Statistics of a run: means, shares of the gradient, cosines and flags of each term."""

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
    """Change of a metric from the beginning to the end of a run.

    Attributes:
        first: mean over the first `over` steps; single batches differ too much.
        last: mean over the last `over` steps.
        over: number of steps in each mean: a quarter of all, at least 1.
    """

    first: float
    last: float
    over: int = 1

    @property
    def relative(self) -> float | None:
        """Change as a fraction of the first value; None where that is 0."""
        return (self.last - self.first) / abs(self.first) if self.first else None


@dataclass(frozen=True)
class TermFinding:
    """Statistics of one term over a run; means are over the steps at which it ran.

    Attributes:
        name: name of the term, `"base"` for the base loss.
        value: change of its value before the weight is applied.
        weight: its last weight; None for the base loss.
        contribution: mean of weight × value.
        grad_norm: mean norm of its weighted gradient; None without a gradient.
        share: mean of its norm divided by the sum of all norms.
        cosine: mean cosine between its gradient and that of the base loss.
        seconds: mean duration of a call.
        steps: number of steps at which it ran.
        flags: warnings about these numbers, see `steelyard.experiment.flags`.
        skipped: number of steps at which it failed and was skipped, by reason, the most frequent
            first.
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
    """Statistics of a run.

    Attributes:
        steps: number of steps in the metrics.
        planned: number of steps in the config.
        loss: change of the total loss.
        held_out: change of the held-out loss; None if it was not measured.
        seconds: time of all steps.
        tracked: whether gradient norms were tracked.
        base: statistics of the base loss.
        terms: statistics of the regularizers.
    """

    steps: int
    planned: int | None
    loss: Change | None
    held_out: Change | None
    seconds: float | None
    tracked: bool
    base: TermFinding
    terms: Sequence[TermFinding] = field(default=())

    def extreme(
        self, attribute: str, pick: Callable[..., TermFinding | None]
    ) -> TermFinding | None:
        """Term with the largest (`pick=max`) or smallest (`min`) attribute; None if none has it."""
        known = [term for term in self.terms if getattr(term, attribute) is not None]
        return pick(known, key=lambda term: getattr(term, attribute), default=None)

    def flagged(self, flag: str) -> list[TermFinding]:
        """Terms with a flag, the largest share or the lowest cosine first."""
        order = {
            DOMINATES: lambda term: -(term.share or 0.0),
            FIGHTS: lambda term: term.cosine or 0.0,
        }.get(flag, lambda _: 0.0)
        return sorted((term for term in self.terms if flag in term.flags), key=order)

    @property
    def skipping(self) -> list[TermFinding]:
        """Terms that were skipped at one step or more."""
        return [term for term in self.terms if term.skipped]


def findings(run: LoadedRun) -> Findings:
    """Compute the statistics of a run from its metrics."""
    planned = (run.config.get("train") or {}).get("steps")
    tracked = bool(run.series("base_loss/grad_norm")[1])
    seconds = run.series("seconds")[1]
    mean_shares = {
        name: _mean([share for share in by_step if share is not None])
        for name, by_step in shares(run).items()
    }
    return Findings(
        steps=len(run.rows),
        planned=planned if isinstance(planned, int) else None,
        loss=_change(run, "loss_total"),
        held_out=_change(run, "held_out/loss", fraction=0),
        seconds=math.fsum(seconds) if seconds else None,
        tracked=tracked,
        base=TermFinding(
            "base",
            value=_change(run, "base_loss/value"),
            contribution=_mean(run.series("base_loss/value")[1]),
            grad_norm=_mean(run.series("base_loss/grad_norm")[1]),
            share=mean_shares["base"],
            steps=len(run.series("base_loss/value")[1]),
        ),
        terms=[_term(run, name, mean_shares[name]) for name in run.terms],
    )


def shares(run: LoadedRun) -> dict[str, list[float | None]]:
    """Share of each term at each step: ‖wᵢgᵢ‖ / Σⱼ ‖wⱼgⱼ‖, where the base loss has weight 1."""
    names = run.terms
    by_step = [gradient_shares(row, names) for row in run.rows]
    return {name: [each[name] for each in by_step] for name in ("base", *names)}


def cosine_key(run: LoadedRun, a: str, b: str) -> str:
    """Key of the metric with the cosine of two terms; the metrics hold one order of each pair."""
    forward, backward = f"cosines/{a}/{b}", f"cosines/{b}/{a}"
    return backward if any(backward in row for row in run.rows) else forward


def _term(run: LoadedRun, name: str, share: float | None) -> TermFinding:
    prefix = f"regularizers/{name}"
    norms = run.series(f"{prefix}/grad_norm")[1]
    cosine = _mean(run.series(cosine_key(run, "base", name))[1]) if any(norms) else None
    return TermFinding(
        name,
        value=_change(run, f"{prefix}/value"),
        weight=_last(run, f"{prefix}/weight"),
        contribution=_mean(run.series(f"{prefix}/contribution")[1]),
        grad_norm=_mean(run.series(f"{prefix}/grad_norm_weighted")[1]),
        share=share,
        cosine=cosine,
        seconds=_mean(run.series(f"{prefix}/duration")[1]),
        steps=len(run.series(f"{prefix}/value")[1]),
        flags=flags_of(
            tracked=any(
                "base_loss/grad_norm" in row and f"{prefix}/value" in row for row in run.rows
            ),
            weight=_first_nonzero(run.series(f"{prefix}/weight")[1]) or 0.0,
            grad_norm=_first_nonzero(norms),
            share=share,
            cosine=cosine,
        ),
        skipped=_skip_counts(run, name),
    )


def _skip_counts(run: LoadedRun, name: str) -> dict[str, int]:
    reasons = (skipped_terms(row).get(name) for row in run.rows)
    counts = Counter(short_reason(name, reason) for reason in reasons if reason is not None)
    return dict(counts.most_common())


def _first_nonzero(values: Sequence[float]) -> float | None:
    """First value that is not 0, or 0 if all are; None if there are no values.

    Flags of a run mean "at every step": a norm or weight counts as 0 only if it always was.
    """
    return next(filter(None, values), 0.0 if values else None)


def _change(run: LoadedRun, key: str, fraction: float = 0.25) -> Change | None:
    """Means over the first and the last `fraction` of the values, at least one value each."""
    values = [value for value in run.series(key)[1] if math.isfinite(value)]
    if not values:
        return None
    over = max(1, int(fraction * len(values)))
    first, last = (math.fsum(some) / over for some in (values[:over], values[-over:]))
    return Change(first, last, over)


def _last(run: LoadedRun, key: str) -> float | None:
    values = run.series(key)[1]
    return values[-1] if values else None


def _mean(values: Sequence[Any]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None
