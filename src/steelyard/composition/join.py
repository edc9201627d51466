"""Joining what came of the terms into one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steelyard.composition.call import Results
from steelyard.gradients import Evaluation, Layout
from steelyard.output import BaseLossOutput, CustomLossOutput, RegularizerOutput
from steelyard.spec import BASE


def join(
    results: Results,
    weights: Mapping[str, float],
    order: Sequence[str],
    layout: Layout,
    not_run: Sequence[str],
    *,
    tracked: bool,
) -> CustomLossOutput:
    """The total loss, its gradient, and what each term contributed and pulled.

    Args:
        results: what came of the terms.
        weights: by name, at this step.
        order: names of the base loss and the regularizers that ran, as in the specs.
        layout: the structure of the log-probs.
        not_run: names of the regularizers that did not.
        tracked: whether norms and cosines are there.
    """
    pull = results.pull
    base = results.evaluations[BASE]
    regularizers = {
        name: _regularizer(name, results.evaluations[name], weights[name], pull.norms.get(name))
        for name in order
        if name != BASE and name in results.evaluations
    }
    regularizer_total = sum(r.contribution for r in regularizers.values())
    return CustomLossOutput(
        loss_total=base.value + regularizer_total,
        base_loss=BaseLossOutput(base.value, pull.norms.get(BASE), base.custom),
        regularizers=regularizers,
        regularizer_total=regularizer_total,
        total_grad_norm=pull.total_norm if tracked else None,
        gradients=layout.split(pull.total),
        cosines=pull.cosines,
        skipped=results.skipped,
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
