"""`FindingWarnings`: what the doctor says about the calls of a composition, as warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import distributed as dist

from steelyard.composition.named_losses import NamedBaseLoss
from steelyard.composition.terms import Term, levels_to_the_caller
from steelyard.doctor.examination import Doctor
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding, FindingWarning
from steelyard.gradients.datum_fields import counted_tokens
from steelyard.output.custom_loss import CustomLossOutput

# The doctor takes a quarter of a millisecond, which is 5 % of a small step: after the first steps,
# where most things go wrong, it sees some of them.
_FIRST_STEPS, _EVERY = 32, 8


@dataclass
class FindingWarnings:
    """Lets the doctor see the outputs of steps, and warns of what it finds.

    It reads nothing but numbers that are on the host already. In a group of processes the first
    one warns.
    """

    _doctor: Doctor = field(default_factory=lambda: Doctor(Facts()))
    _terms: tuple[Term, ...] = ()
    _last_step: int = -1

    def observe(
        self, step: int, base: Term, terms: Sequence[Term], output: CustomLossOutput, data: Any
    ) -> None:
        """Show the doctor the first call of a step; warn of findings that begin or end with it.

        Args:
            step: number of the step.
            base: the base loss.
            terms: the regularizers.
            output: of the call.
            data: of the call; None if they are not known.
        """
        if step <= self._last_step or (step >= _FIRST_STEPS and step % _EVERY):
            return
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return
        if self._terms != tuple(terms) or self._last_step < 0:
            self._terms = tuple(terms)
            self._doctor.facts = _facts_of(base, terms, data)
        metrics: dict[str, Any] = output.metrics
        if self._last_step < 0 and self._doctor.facts.reduction == "sum":
            metrics["tokens"] = _count_tokens(data)
        self._last_step = step
        for finding in self._doctor.observe(step, metrics):
            if finding.severity != "information" and not _is_said(finding, terms):
                text = f"{finding.severity} at step {step}: {finding.text}"
                warnings.warn(FindingWarning(text, finding), stacklevel=levels_to_the_caller())


def _facts_of(base: Term, terms: Iterable[Term], data: Any) -> Facts:
    fn = base.spec.fn
    named = fn if isinstance(fn, NamedBaseLoss) else None
    reduction = getattr(fn, "reduction", "sum" if named else "")
    facts = Facts(
        loss=named.loss.name if named else "",
        reduction=reduction if reduction in ("mean", "sum") else "",
        batch_size=len(data) if isinstance(data, Sequence) and len(data) else None,
    )
    return facts.with_specs(term.spec for term in terms)


def _count_tokens(data: Any) -> float | None:
    """Number of the tokens of a batch that count; None if that is not known."""
    counted = [counted_tokens(datum) for datum in data] if isinstance(data, Sequence) else [None]
    if None in counted:
        return None
    return float(sum(int(mask.sum()) for _, mask in filter(None, counted)))


def _is_said(finding: Finding, terms: Iterable[Term]) -> bool:
    """Whether a `DetachedTermWarning` has said it, at the first call."""
    detached = {f"regularizers/{term.name}" for term in terms if term.statistics.warned}
    return finding.rule == "no gradient" and finding.subject in detached
