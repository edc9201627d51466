"""Norms, cosines and the terms' own metrics of an optimizer step, from its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from steelyard.composition import TermResult
from steelyard.gradients import gram, norm_of, norms_and_cosines
from steelyard.output import CustomLossOutput, accumulated
from steelyard.spec import BASE

# Ends and parts of the names of metrics that are kept here; `MetricAccumulator` has the others.
_ENDS = ("grad_norm", "grad_norm_weighted", "bound", "violation")
_PARTS = ("cosines/", "factors/", "/custom/")


class StepDetails:
    """What the outputs of the micro-batches of one optimizer step say beside values and weights.

    A micro-batch c counts with a factor f_c: for the base loss 1/divisor, for a term share/divisor.
    The gradient of a term in the step is Σ f_c g_c. With several processes its rows are not known,
    and its norm is given as Σ f_c ‖g_c‖, an upper bound, with the mean cosine. A term's own metrics
    are combined as `accumulated` does.
    """

    def __init__(self) -> None:
        self._outputs: list[CustomLossOutput] = []
        self._factors: list[dict[str, float]] = []
        self._results: list[list[TermResult]] = []
        self._rows: dict[str, list[Tensor | None]] = {}

    def observe(self, results: Sequence[TermResult]) -> None:
        """Keep the gradients of a micro-batch until `add`."""
        self._results = [[replace(result) for result in results]]

    def add(self, output: CustomLossOutput, share: float, divisor: int) -> None:
        """Add the output of a micro-batch whose results were observed."""
        names = (BASE, *output.regularizers)
        factors = {name: (1.0 if name == BASE else share) / divisor for name in names}
        self._outputs.append(output)
        self._factors.append(factors)
        (results,) = self._results or [[]]
        self._results = []
        for result in results:
            name = result.term.name
            row = [g for key in result.space for g in result.gradients.get(key, ())]
            if not row or name not in factors:
                continue
            weight = factors[name] * float(result.weight) * output.factors.get(name, 1.0)
            # The cosine of a term with a lower bound is that of its negative.
            sign = -1.0 if result.bound is not None and not result.bound.upper else 1.0
            self._add(name, row, sign * factors[name])
            self._add("", row, weight)

    def end_step(self) -> dict[str, float]:
        """Metrics of the step under the keys of `CustomLossOutput.metrics`; begins the next one."""
        outputs, factors, rows = self._outputs, self._factors, self._rows
        self.__init__()  # type: ignore[misc]
        if not outputs:
            return {}
        step = outputs[0] if len(outputs) == 1 else _combined(outputs, factors, rows)
        return {
            name: value
            for name, value in step.metrics.items()
            if name.endswith(_ENDS) or any(part in name for part in _PARTS)
        }

    def _add(self, name: str, row: Sequence[Tensor | None], factor: float) -> None:
        before = self._rows.get(name, [None] * len(row))
        self._rows[name] = [
            x if y is None else factor * y if x is None else x + factor * y
            for x, y in zip(before, row, strict=True)
        ]


def _combined(
    outputs: Sequence[CustomLossOutput],
    factors: Sequence[Mapping[str, float]],
    rows: Mapping[str, Sequence[Tensor | None]],
) -> CustomLossOutput:
    """Output of a step with several micro-batches."""
    norms: dict[str, float] = {}
    names = [name for name in rows if name]
    if names:
        norms, cosines = norms_and_cosines(names, gram([rows[name] for name in names]))
        total_norm: float | None = norm_of(rows[""])
    else:
        for output, of_call in zip(outputs, factors, strict=True):
            for name, norm in _norms(output).items():
                norms[name] = norms.get(name, 0.0) + of_call[name] * norm
        pairs = dict.fromkeys(pair for output in outputs for pair in output.cosines)
        cosines = {
            pair: _mean([o.cosines[pair] for o in outputs if pair in o.cosines]) for pair in pairs
        }
        total_norm = None
    step = accumulated([_without_norms(output) for output in outputs], factors)
    regularizers = {}
    for name, term in step.regularizers.items():
        running = [(o, f[name]) for o, f in zip(outputs, factors, strict=True) if name in f]
        whole = math.fsum(factor for _, factor in running) or 1.0
        weight = math.fsum(f * o.regularizers[name].weight for o, f in running) / whole
        own = norms.get(name)
        weighted = None if own is None else weight * own
        regularizers[name] = replace(term, grad_norm=own, grad_norm_weighted=weighted)
    return replace(
        step,
        base_loss=replace(step.base_loss, grad_norm=norms.get(BASE)),
        regularizers=regularizers,
        cosines=cosines,
        total_grad_norm=total_norm,
    )


def _norms(output: CustomLossOutput) -> dict[str, float]:
    found = {BASE: output.base_loss.grad_norm}
    found |= {name: term.grad_norm for name, term in output.regularizers.items()}
    return {name: norm for name, norm in found.items() if norm is not None}


def _without_norms(output: CustomLossOutput) -> CustomLossOutput:
    terms = {
        name: replace(term, grad_norm=None, grad_norm_weighted=None)
        for name, term in output.regularizers.items()
    }
    base = replace(output.base_loss, grad_norm=None)
    return replace(output, base_loss=base, regularizers=terms, cosines={}, total_grad_norm=None)


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)
