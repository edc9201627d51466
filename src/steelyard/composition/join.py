"""Joining what came of the terms into one output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from steelyard.composition.call import Results
from steelyard.gradients import Evaluation, Layout, norms_and_cosines, weighted_sum
from steelyard.output import BaseLossOutput, CustomLossOutput, RegularizerOutput
from steelyard.spec import BASE


def join(
    results: Results,
    weights: Mapping[str, float],
    order: Sequence[str],
    layout: Layout,
    flat: Tensor,
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
        flat: the log-probs, for the dtype and device of the gradient.
        not_run: names of the regularizers that did not.
        tracked: whether to compute norms and cosines.
    """
    evaluations = {name: results.evaluations[name] for name in order if name in results.evaluations}
    gradients = {n: e.gradient for n, e in evaluations.items() if e.gradient is not None}
    total = _total(results.joint, gradients, weights, flat)
    norms: dict[str, float] = {}
    cosines: dict[tuple[str, str], float] = {}
    if tracked and gradients:
        lengths, table = norms_and_cosines(list(gradients.values()))
        norms = dict(zip(gradients, lengths, strict=True))
        cosines = {(a, b): table[i][j] for (i, a), (j, b) in combinations(enumerate(gradients), 2)}
    base = evaluations[BASE]
    regularizers = {
        name: _regularizer(name, evaluation, weights[name], norms.get(name))
        for name, evaluation in evaluations.items()
        if name != BASE
    }
    regularizer_total = sum(r.contribution for r in regularizers.values())
    return CustomLossOutput(
        loss_total=base.value + regularizer_total,
        base_loss=BaseLossOutput(base.value, norms.get(BASE), base.custom),
        regularizers=regularizers,
        regularizer_total=regularizer_total,
        total_grad_norm=norms_and_cosines([total])[0][0] if tracked else None,
        gradients=layout.split(total),
        cosines=cosines,
        skipped=dict(results.skipped),
        not_run=tuple(not_run),
    )


def _total(
    joint: Tensor | None,
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, float],
    flat: Tensor,
) -> Tensor:
    factors = [weights[name] for name in gradients]
    vectors = list(gradients.values())
    if joint is not None:
        factors, vectors = [1.0, *factors], [joint, *vectors]
    if not vectors:
        return torch.zeros_like(flat)
    return vectors[0] if factors == [1.0] else weighted_sum(factors, vectors)


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
