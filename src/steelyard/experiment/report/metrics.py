"""Statistics of a run: means, shares of the gradient, cosines and flags of each term."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.experiment.flags import DOMINATES, FIGHTS, flags_of
from steelyard.experiment.report.change import Change, change_of, mean_of
from steelyard.experiment.report.load import LoadedRun, Row
from steelyard.experiment.report.reward_metrics import RolloutFindings, rollout_findings
from steelyard.experiment.step_metrics import (
    Gradient,
    gradients,
    short_reason,
    skipped_terms,
    terms_that_ran,
)
from steelyard.spec import BASE

_UNMET = 0.05  # of a bound: a violation below this is the noise of a batch


@dataclass(frozen=True)
class TermFinding:
    """Statistics of one term over a run; means are over the steps at which it ran.

    Attributes:
        name: name of the term, `"base"` for the base loss.
        value: change of its value before the weight is applied.
        weight: its last weight; None for the base loss.
        contribution: mean of weight × value.
        grad_norm: mean norm of its weighted gradient; None without a gradient.
        gradient: its gradient over the run; None without one, or if it was 0 at every step.
        seconds: mean duration of a call.
        steps: number of steps at which it ran.
        flags: warnings about these numbers, see `steelyard.experiment.flags`.
        skipped: number of steps at which it failed and was skipped, by reason, the most frequent
            first.
        bound: its last bound; None for a term with a weight.
        factor: mean factor that an aggregator put on its weighted gradient; None for the plain sum.
        unmet: number of steps at which its value was beyond the bound by more than 5 % of it,
            for a bound of 0 at all.
    """

    name: str
    value: Change | None = None
    weight: float | None = None
    contribution: float | None = None
    grad_norm: float | None = None
    gradient: Gradient | None = None
    seconds: float | None = None
    steps: int = 0
    flags: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    bound: float | None = None
    unmet: int = 0
    factor: float | None = None

    @property
    def share(self) -> float | None:
        """Its share of the sum of the gradient norms in its space, over all steps."""
        return None if self.gradient is None else self.gradient.share

    @property
    def cosine(self) -> float | None:
        """Mean cosine between its gradient and that of the base loss."""
        return None if self.gradient is None else self.gradient.cosine

    @property
    def cancelled(self) -> float | None:
        """Fraction of the gradient of the base loss that its gradient cancels."""
        return None if self.gradient is None else self.gradient.cancelled

    @property
    def space(self) -> str | None:
        """Space that its gradient is with respect to."""
        return None if self.gradient is None else self.gradient.space


@dataclass(frozen=True)
class Findings:
    """Statistics of a run.

    Attributes:
        steps: number of steps in the metrics.
        planned: number of steps in the config.
        loss: change of the total loss over the steps with the same terms and weights; None if
            there are fewer than two: the total of other steps is the sum of something else.
        per_token: change of the base loss per token; None unless it is cross-entropy, whose sum
            over a batch also changes with the number of tokens.
        tokens: smallest and largest number of tokens of a batch, where the base loss is their sum.
        held_out: change of the held-out loss; None if it was not measured.
        seconds: time of all steps.
        tracked: number of steps at which gradient norms were tracked.
        base: statistics of the base loss.
        terms: statistics of the regularizers.
        rollouts: statistics of the rewards and answers; None unless it is an on-policy run.
        tokens_per_second: mean over the steps of the tokens trained on in a second.
    """

    steps: int
    planned: int | None
    loss: Change | None
    held_out: Change | None
    seconds: float | None
    tracked: int
    base: TermFinding
    terms: Sequence[TermFinding] = field(default=())
    per_token: Change | None = None
    tokens: tuple[float, float] | None = None
    rollouts: RolloutFindings | None = None
    tokens_per_second: float | None = None

    def extreme(
        self, attribute: str, pick: Callable[..., TermFinding | None]
    ) -> TermFinding | None:
        """Term with the largest (`pick=max`) or smallest (`min`) attribute; None if none has it."""
        known = [term for term in self.terms if getattr(term, attribute) is not None]
        return pick(known, key=lambda term: getattr(term, attribute), default=None)

    def flagged(self, flag: str) -> list[TermFinding]:
        """Terms with a flag, the largest share or the strongest opposition first."""
        order = {
            DOMINATES: lambda term: -(term.share or 0.0),
            FIGHTS: lambda term: -(term.cancelled or 0.0),
        }.get(flag, lambda _: 0.0)
        return sorted((term for term in self.terms if flag in term.flags), key=order)

    @property
    def strongest(self) -> TermFinding | None:
        """Term with the largest share among those that share their space with another gradient."""
        known = [term for term in self.terms if term.gradient and not term.gradient.alone]
        return max(known, key=lambda term: term.share or 0.0, default=None)

    @property
    def spaces(self) -> list[str]:
        """Spaces of the gradients, that of the base loss first."""
        return list(dict.fromkeys(each.space for each in (self.base, *self.terms) if each.space))

    @property
    def aggregated(self) -> list[TermFinding]:
        """The base loss and the terms, if an aggregator put factors on their gradients."""
        every = [self.base, *self.terms]
        return every if any(term.factor is not None for term in every) else []

    @property
    def bounded(self) -> list[TermFinding]:
        """Terms with a bound instead of a weight."""
        return [term for term in self.terms if term.bound is not None]

    @property
    def skipping(self) -> list[TermFinding]:
        """Terms that were skipped at one step or more."""
        return [term for term in self.terms if term.skipped]


def findings(run: LoadedRun) -> Findings:
    """Compute the statistics of a run from its metrics."""
    planned = (run.config.get("train") or {}).get("steps")
    seconds = run.series("seconds")[1]
    by_name = gradients(run.rows, run.terms)
    loss = run.config.get("loss") or {}
    cross_entropy = loss.get("use") == "cross_entropy"
    is_sum = cross_entropy and (loss.get("options") or {}).get("reduction", "sum") == "sum"
    tokens = run.series("tokens")[1]
    return Findings(
        steps=len(run.rows),
        planned=planned if isinstance(planned, int) else None,
        loss=_comparable_change(run),
        held_out=change_of(run.series("held_out/loss")[1], fraction=0),
        seconds=math.fsum(seconds) if seconds else None,
        tracked=len(tracked_rows(run)),
        base=TermFinding(
            BASE,
            value=change_of(run.series("base_loss/value")[1]),
            contribution=mean_of(run.series("base_loss/value")[1]),
            grad_norm=mean_of(run.series("base_loss/grad_norm")[1]),
            gradient=by_name.get(BASE),
            steps=len(run.series("base_loss/value")[1]),
            factor=mean_of(run.series("factors/base")[1]),
        ),
        terms=[_term(run, name, by_name.get(name)) for name in run.terms],
        per_token=change_of(run.series("nll")[1]) if cross_entropy else None,
        tokens=(min(tokens), max(tokens)) if is_sum and tokens else None,
        rollouts=rollout_findings(run),
        tokens_per_second=mean_of(run.series("tokens_per_second")[1]),
    )


def tracked_rows(run: LoadedRun) -> list[Row]:
    """Metrics of the steps at which gradient norms were tracked."""
    return [row for row in run.rows if "base_loss/grad_norm" in row]


def shares(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[float | None]]:
    """Share of each term at each step in the sum of the norms of these terms, of one space."""
    by_step = [gradients([row], names) for row in rows]
    return {
        name: [each[name].share if name in each else None for each in by_step] for name in names
    }


def last_cosine(rows: Sequence[Row], a: str, b: str) -> float | None:
    """Cosine of two terms at the last step at which both had a gradient; None without one.

    Where the gradient of a term is 0 the metrics have a cosine of 0, which says nothing.
    """
    norms = [
        "base_loss/grad_norm" if name == BASE else f"regularizers/{name}/grad_norm"
        for name in (a, b)
    ]
    keys = f"cosines/{a}/{b}", f"cosines/{b}/{a}"  # the metrics have one order of each pair
    for row in reversed(rows):
        found = next((row[key] for key in keys if key in row), None)
        if found is not None and all(row.get(norm) for norm in norms):
            return float(found)
    return None


def _term(run: LoadedRun, name: str, gradient: Gradient | None) -> TermFinding:
    prefix = f"regularizers/{name}"
    if not any(run.series(f"{prefix}/grad_norm")[1]):
        gradient = None
    return TermFinding(
        name,
        value=change_of(run.series(f"{prefix}/value")[1]),
        weight=_last(run, f"{prefix}/weight"),
        contribution=mean_of(run.series(f"{prefix}/contribution")[1]),
        grad_norm=mean_of(run.series(f"{prefix}/grad_norm_weighted")[1]),
        gradient=gradient,
        seconds=mean_of(run.series(f"{prefix}/duration")[1]),
        steps=len(run.series(f"{prefix}/value")[1]),
        flags=flags_of(
            tracked=any(
                "base_loss/grad_norm" in row and f"{prefix}/value" in row for row in run.rows
            ),
            weight=_first_nonzero(run.series(f"{prefix}/weight")[1]),
            gradient=gradient,
        ),
        skipped=_skip_counts(run, name),
        bound=_last(run, f"{prefix}/bound"),
        unmet=_unmet_steps(run, prefix),
        factor=mean_of(run.series(f"factors/{name}")[1]),
    )


def _unmet_steps(run: LoadedRun, prefix: str) -> int:
    beyond = ((row.get(f"{prefix}/violation"), row.get(f"{prefix}/bound")) for row in run.rows)
    return sum(
        violation > _UNMET * abs(bound)
        for violation, bound in beyond
        if violation is not None and bound is not None
    )


def _skip_counts(run: LoadedRun, name: str) -> dict[str, int]:
    reasons = (skipped_terms(row).get(name) for row in run.rows)
    counts = Counter(short_reason(reason) for reason in reasons if reason is not None)
    return dict(counts.most_common())


def _first_nonzero(values: Sequence[float]) -> float:
    """First value that is not 0; 0 if there is none.

    Flags of a run mean "at every step": a weight counts as 0 only if it always was.
    """
    return next(filter(None, values), 0.0)


def _comparable_change(run: LoadedRun) -> Change | None:
    """Change of the total loss over the largest set of steps with the same terms and weights."""
    by_terms: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for row in run.rows:
        loss = row.get("loss_total")
        if isinstance(loss, int | float):
            ran = tuple(
                (name, row.get(f"regularizers/{name}/weight")) for name in terms_that_ran(row)
            )
            by_terms.setdefault(ran, []).append(loss)
    largest = max(by_terms.values(), key=len, default=[])
    return change_of(largest) if len(largest) > 1 or len(run.rows) == 1 else None


def _last(run: LoadedRun, key: str) -> float | None:
    values = run.series(key)[1]
    return values[-1] if values else None
