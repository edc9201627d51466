"""Joining what came of the terms into one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from steelyard.composition.call import Call
from steelyard.composition.term import Term
from steelyard.gradients import Evaluation, Layout, Nest, mapped
from steelyard.output import BaseLossOutput, CustomLossOutput, RegularizerOutput


def join(
    call: Call, layout: Layout, given: Mapping[str, Nest], not_run: Sequence[str], *, tracked: bool
) -> CustomLossOutput:
    """The total loss, its gradient, and what each term contributed and pulled.

    Args:
        call: the base loss and the regularizers that ran, and their gradients, combined.
        layout: the structure of the log-probs.
        given: what there was beyond them.
        not_run: names of the regularizers that did not run.
        tracked: whether norms and cosines are there.
    """
    parts, pull, beyond = call.parts, call.pull, call.beyond
    base = BaseLossOutput(0.0)
    regularizers: dict[str, RegularizerOutput] = {}
    for part in parts:
        name, evaluation = part.term.name, part.evaluation
        if evaluation is None:
            continue
        norm = call.norm_of(part.term)
        if part.term.is_base:
            base = BaseLossOutput(evaluation.value, norm, evaluation.custom)
        else:
            regularizers[name] = _regularizer(part.term, evaluation, part.weight, norm)
    regularizer_total = sum(r.contribution for r in regularizers.values())
    return CustomLossOutput(
        loss_total=base.value + regularizer_total,
        base_loss=base,
        regularizers=regularizers,
        regularizer_total=regularizer_total,
        total_grad_norm=pull.total_norm if tracked else None,
        gradients=layout.split(pull.total),
        beyond={need: _nest(given[need], totals) for need, totals in beyond.totals.items()},
        cosines={**pull.cosines, **beyond.cosines},
        skipped={part.term.name: part.skipped for part in parts if part.skipped is not None},
        not_run=tuple(not_run),
    )


def _nest(given: Nest, totals: Sequence[Tensor | None]) -> Nest:
    each = iter(totals)
    return mapped(given, lambda _: next(each))


def _regularizer(
    term: Term, evaluation: Evaluation, weight: float, norm: float | None
) -> RegularizerOutput:
    return RegularizerOutput(
        name=term.name,
        value=evaluation.value,
        weight=weight,
        contribution=weight * evaluation.value,
        grad_norm=norm,
        grad_norm_weighted=None if norm is None else weight * norm,
        custom=evaluation.custom,
        duration=evaluation.duration,
        grad_space=term.grad_space,
    )
