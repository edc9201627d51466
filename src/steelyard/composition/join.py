"""Joining what came of the terms into one output."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.composition.part import Part
from steelyard.gradients import Evaluation, Layout, Pull
from steelyard.output import BaseLossOutput, CustomLossOutput, RegularizerOutput


def join(
    parts: Sequence[Part], pull: Pull, layout: Layout, not_run: Sequence[str], *, tracked: bool
) -> CustomLossOutput:
    """The total loss, its gradient, and what each term contributed and pulled.

    Args:
        parts: the base loss and the regularizers that ran, in order.
        pull: their gradients, combined.
        layout: the structure of the log-probs.
        not_run: names of the regularizers that did not run.
        tracked: whether norms and cosines are there.
    """
    base = BaseLossOutput(0.0)
    regularizers: dict[str, RegularizerOutput] = {}
    for part in parts:
        name, evaluation = part.term.name, part.evaluation
        if evaluation is None:
            continue
        norm = pull.norms.get(name)
        if part.term.is_base:
            base = BaseLossOutput(evaluation.value, norm, evaluation.custom)
        else:
            regularizers[name] = _regularizer(name, evaluation, part.weight, norm)
    regularizer_total = sum(r.contribution for r in regularizers.values())
    return CustomLossOutput(
        loss_total=base.value + regularizer_total,
        base_loss=base,
        regularizers=regularizers,
        regularizer_total=regularizer_total,
        total_grad_norm=pull.total_norm if tracked else None,
        gradients=layout.split(pull.total),
        cosines=pull.cosines,
        skipped={part.term.name: part.skipped for part in parts if part.skipped is not None},
        not_run=tuple(not_run),
    )


def _regularizer(
    name: str, evaluation: Evaluation, weight: float, norm: float | None
) -> RegularizerOutput:
    return RegularizerOutput(
        name=name,
        value=evaluation.value,
        weight=weight,
        contribution=weight * evaluation.value,
        grad_norm=norm,
        grad_norm_weighted=None if norm is None else weight * norm,
        custom=evaluation.custom,
        duration=evaluation.duration,
    )
