"""Statistics of a run: its terms, rewards and answers; means, shares and cosines; its findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.doctor.examination import diagnose
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding, worst_first
from steelyard.doctor.rule import percent
from steelyard.doctor.term_rules import BEYOND
from steelyard.experiment.page.load import LoadedRun, Row, configured_terms
from steelyard.output.step_metrics import (
    Gradient,
    gradients,
    short_reason,
    skipped_terms,
    terms_that_ran,
)
from steelyard.spec.error_messages import BASE

NO_TOKENS = "no tokens"


@dataclass(frozen=True)
class Change:
    """Change of a metric from the beginning to the end of a run.

    Attributes:
        first: mean over the first `over` steps; single batches differ too much.
        last: mean over the last `over` steps.
        over: number of steps in each mean: a quarter of those compared, at least 1.
        steps: number of steps that were compared.
    """

    first: float
    last: float
    over: int = 1
    steps: int = 1

    @property
    def relative(self) -> float | None:
        """Change as a fraction of the first value; None where that is 0."""
        return (self.last - self.first) / abs(self.first) if self.first else None


def change_of(values: Sequence[float], fraction: float = 0.25) -> Change | None:
    """Means over the first and the last `fraction` of the values, at least one value each."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    over = max(1, int(fraction * len(finite)))
    first, last = (math.fsum(some) / over for some in (finite[:over], finite[-over:]))
    return Change(first, last, over, len(finite))


def mean_of(values: Sequence[Any]) -> float | None:
    """Mean of the values that are finite; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


@dataclass(frozen=True)
class TermStatistics:
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
        findings: what the doctor says about it at the last step, the most severe first.
        skipped: number of steps at which it failed and was skipped, by reason, the most frequent
            first.
        bound: its last bound; None for a term with a weight.
        factor: mean factor that an aggregator put on its weighted gradient; None for the plain sum.
        unmet: number of steps at which its value was beyond the bound by more than 20 % of it,
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
    findings: tuple[Finding, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    bound: float | None = None
    unmet: int = 0
    factor: float | None = None

    @property
    def beyond(self) -> str:
        """Words on the steps at which its bound was not kept."""
        return f"beyond it by more than {percent(BEYOND)}" if self.bound else "beyond it"

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
class RunStatistics:
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
        findings: what the doctor says about the run, in the order in which it began.
    """

    steps: int
    planned: int | None
    loss: Change | None
    held_out: Change | None
    seconds: float | None
    tracked: int
    base: TermStatistics
    terms: Sequence[TermStatistics] = field(default=())
    per_token: Change | None = None
    tokens: tuple[float, float] | None = None
    rollouts: RolloutStatistics | None = None
    tokens_per_second: float | None = None
    findings: Sequence[Finding] = field(default=())

    def extreme(
        self, attribute: str, pick: Callable[..., TermStatistics | None]
    ) -> TermStatistics | None:
        """Term with the largest (`pick=max`) or smallest (`min`) attribute; None if none has it."""
        known = [term for term in self.terms if getattr(term, attribute) is not None]
        return pick(known, key=lambda term: getattr(term, attribute), default=None)

    @property
    def lasting(self) -> list[Finding]:
        """Findings at the last step, the most severe first."""
        return worst_first(finding for finding in self.findings if finding.ended is None)

    @property
    def ended(self) -> list[Finding]:
        """Findings that have ended before the last step."""
        return [finding for finding in self.findings if finding.ended is not None]

    @property
    def strongest(self) -> TermStatistics | None:
        """Term with the largest share among those that share their space with another gradient."""
        known = [term for term in self.terms if term.gradient and not term.gradient.alone]
        return max(known, key=lambda term: term.share or 0.0, default=None)

    @property
    def spaces(self) -> list[str]:
        """Spaces of the gradients, that of the base loss first."""
        return list(dict.fromkeys(each.space for each in (self.base, *self.terms) if each.space))

    @property
    def aggregated(self) -> list[TermStatistics]:
        """The base loss and the terms, if an aggregator put factors on their gradients."""
        every = [self.base, *self.terms]
        return every if any(term.factor is not None for term in every) else []

    @property
    def bounded(self) -> list[TermStatistics]:
        """Terms with a bound instead of a weight."""
        return [term for term in self.terms if term.bound is not None]

    @property
    def skipping(self) -> list[TermStatistics]:
        """Terms that were skipped at one step or more."""
        return [term for term in self.terms if term.skipped]


def statistics_of(run: LoadedRun, findings: Sequence[Finding] | None = None) -> RunStatistics:
    """Compute the statistics of a run from its metrics.

    Args:
        run: the run.
        findings: what the doctor says about it, if that is known.
    """
    planned = (run.config.get("train") or {}).get("steps")
    seconds = run.series("seconds")[1]
    by_name = gradients(run.rows, run.terms)
    skipped = _skip_counts(run)
    loss = run.config.get("loss") or {}
    cross_entropy = loss.get("use") == "cross_entropy"
    is_sum = cross_entropy and reduction_of(loss) == "sum"
    tokens = run.series("tokens")[1]
    failure = [] if run.failure is None else [run.failure]
    if findings is None:
        findings = diagnose(Facts.of_config(run.config), [*run.rows, *failure])
    return RunStatistics(
        steps=len(run.rows),
        planned=planned if isinstance(planned, int) else None,
        loss=_comparable_change(run),
        held_out=change_of(run.series("held_out/loss")[1], fraction=0),
        seconds=math.fsum(seconds) if seconds else None,
        tracked=len(tracked_rows(run)),
        base=TermStatistics(
            BASE,
            value=change_of(run.series("base_loss/value")[1]),
            contribution=mean_of(run.series("base_loss/value")[1]),
            grad_norm=mean_of(run.series("base_loss/grad_norm")[1]),
            gradient=by_name.get(BASE),
            steps=len(run.series("base_loss/value")[1]),
            factor=mean_of(run.series("factors/base")[1]),
        ),
        terms=[_term(run, name, by_name.get(name), findings, skipped) for name in run.terms],
        per_token=change_of(run.series("nll")[1]) if cross_entropy else None,
        tokens=(min(tokens), max(tokens)) if is_sum and tokens else None,
        rollouts=rollout_statistics(run),
        tokens_per_second=mean_of(run.series("tokens_per_second")[1]),
        findings=findings,
    )


def reduction_of(loss: Mapping[str, Any]) -> str:
    """Reduction of a ready-made base loss; runs of 0.1.0 had it in the options, or a sum."""
    options = loss.get("options") or {}
    return str(loss.get("reduction") or options.get("reduction") or "sum")


def tracked_rows(run: LoadedRun) -> list[Row]:
    """Metrics of the steps at which gradient norms were tracked."""
    return [row for row in run.rows if "base_loss/grad_norm" in row]


def _term(
    run: LoadedRun,
    name: str,
    gradient: Gradient | None,
    findings: Sequence[Finding],
    skipped: Mapping[str, Mapping[str, int]],
) -> TermStatistics:
    prefix = f"regularizers/{name}"
    if not any(run.series(f"{prefix}/grad_norm")[1]):
        gradient = None
    return TermStatistics(
        name,
        value=change_of(run.series(f"{prefix}/value")[1]),
        weight=_last(run, f"{prefix}/weight"),
        contribution=mean_of(run.series(f"{prefix}/contribution")[1]),
        grad_norm=mean_of(run.series(f"{prefix}/grad_norm_weighted")[1]),
        gradient=gradient,
        seconds=mean_of(run.series(f"{prefix}/duration")[1]),
        steps=len(run.series(f"{prefix}/value")[1]),
        findings=tuple(worst_first(f for f in findings if f.subject == prefix and f.ended is None)),
        skipped=skipped.get(name, {}),
        bound=_last(run, f"{prefix}/bound"),
        unmet=_unmet_steps(run, prefix),
        factor=mean_of(run.series(f"factors/{name}")[1]),
    )


def _unmet_steps(run: LoadedRun, prefix: str) -> int:
    beyond = ((row.get(f"{prefix}/violation"), row.get(f"{prefix}/bound")) for row in run.rows)
    return sum(
        violates(violation, bound)
        for violation, bound in beyond
        if violation is not None and bound is not None
    )


def violates(violation: float, bound: float) -> bool:
    """Return whether a value is beyond its bound, as the doctor judges; for a bound of 0 at all."""
    return violation > BEYOND * abs(bound)


def _skip_counts(run: LoadedRun) -> dict[str, dict[str, int]]:
    """Number of steps at which each term was skipped, by reason, the most frequent first."""
    counts: dict[str, Counter[str]] = {}
    for row in run.rows:
        for name, reason in skipped_terms(row).items():
            counts.setdefault(name, Counter())[short_reason(reason)] += 1
    return {name: dict(reasons.most_common()) for name, reasons in counts.items()}


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


@dataclass(frozen=True)
class RewardStatistics:
    """Statistics of one reward over a run.

    Attributes:
        name: name of the reward.
        mean: change of its mean over the answers of a step.
        std: mean over the steps of its standard deviation over the answers.
        weight: its last weight; 0 if it is not enabled.
        failed: number of answers for which it failed.
        held_out: change of its mean over the held-out prompts.
        share: norm of the part of the base loss's gradient that is due to it, divided by the sum of
            these norms, over all steps; None with a single reward, or if it was not tracked.
        cosine: mean cosine between this part and the gradient of the base loss.
    """

    name: str
    mean: Change | None
    std: float | None
    weight: float
    failed: int
    held_out: Change | None
    share: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class RolloutStatistics:
    """Statistics of the answers of a run.

    Attributes:
        rewards: statistics of each reward.
        total: change of the weighted sum of the rewards; None if their weights changed, since the
            sums of different steps are then sums of something else.
        held_out: change of that sum over the held-out prompts; None as above, or if none was held
            out.
        fixed_weights: whether each reward has the same weight at all steps.
        no_signal: mean over the steps of the share of groups without signal.
        tokens: change of the mean length of the answers.
        truncated: mean over the steps of the share of answers that were cut at the maximum.
        entropy: change of the entropy estimate.
        kl: change of the KL estimate; None if no term reads the reference.
        answers: number of sampled answers that are on record.
        dropped: number of answers that were dropped.
        reasons: number of dropped answers by reason, the most frequent first.
    """

    rewards: Sequence[RewardStatistics]
    total: Change | None
    held_out: Change | None
    fixed_weights: bool
    no_signal: float | None
    tokens: Change | None
    truncated: float | None
    entropy: Change | None
    kl: Change | None
    answers: int
    dropped: int
    reasons: Mapping[str, int]

    @property
    def only_reward(self) -> RewardStatistics | None:
        """The reward that the weighted sum equals, if there is one."""
        weighted = [reward for reward in self.rewards if reward.weight]
        return weighted[0] if len(weighted) == 1 and weighted[0].weight == 1 else None


def rollout_statistics(run: LoadedRun) -> RolloutStatistics | None:
    """Compute the statistics of an on-policy run; None for a run without rewards."""
    if not run.rewards:
        return None
    fixed = all(len(set(run.series(f"rewards/{name}/weight")[1])) == 1 for name in run.rewards)
    sampled = [record for record in run.rollouts if not record.get("held_out")]

    def change(key: str, fraction: float = 0.25) -> Change | None:
        return change_of(run.series(key)[1], fraction)

    return RolloutStatistics(
        rewards=[_reward(run, name) for name in run.rewards],
        total=change("rollouts/reward") if fixed else None,
        held_out=change("held_out/reward", 0) if fixed else None,
        fixed_weights=fixed,
        no_signal=mean_of(run.series("rollouts/no_signal")[1]),
        tokens=change("rollouts/answer_tokens"),
        truncated=mean_of(run.series("rollouts/truncated")[1]),
        entropy=change("rollouts/entropy"),
        kl=change("rollouts/kl"),
        answers=len(sampled),
        dropped=_total(run, "rollouts/dropped"),
        reasons=_drop_counts(sampled, run.config),
    )


def _reward(run: LoadedRun, name: str) -> RewardStatistics:
    prefix = f"rewards/{name}"
    return RewardStatistics(
        name,
        mean=change_of(run.series(f"{prefix}/mean")[1]),
        std=mean_of(run.series(f"{prefix}/std")[1]),
        weight=run.series(f"{prefix}/weight")[1][-1],
        failed=_total(run, f"{prefix}/failed"),
        held_out=change_of(run.series(f"held_out/{prefix}")[1], fraction=0),
        share=_share(run, name),
        cosine=mean_of(run.series(f"{prefix}/cosines/base")[1]),
    )


def _share(run: LoadedRun, name: str) -> float | None:
    norms = {other: run.series(f"rewards/{other}/grad_norm")[1] for other in run.rewards}
    total = math.fsum(norm for of_reward in norms.values() for norm in of_reward)
    is_alone = sum(bool(of_reward) for of_reward in norms.values()) == 1
    return None if is_alone or not total or not norms[name] else math.fsum(norms[name]) / total


def _total(run: LoadedRun, key: str) -> int:
    return round(math.fsum(run.series(key)[1]))


def _drop_counts(sampled: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, int]:
    rewards = configured_terms(config, "rewards")
    enabled = [bool(entry.get("enabled", True)) for entry in rewards]
    reasons = [_drop_reason(each, enabled) for each in sampled if each.get("reward") is None]
    return dict(Counter(reasons).most_common())


def _drop_reason(record: Mapping[str, Any], enabled: Sequence[bool]) -> str:
    """Failure of the first enabled reward that failed; the rewards are in the config's order."""
    scores = record.get("rewards") or {}
    counted = {name for name, counts in zip(scores, enabled, strict=False) if counts}
    for name, reason in (record.get("failed") or {}).items():
        if name in counted:
            return f"“{name}” failed: {short_reason(str(reason))}"
    return NO_TOKENS
