"""Norms, cosines and the terms' own metrics of an optimizer step, from its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torch import Tensor

from steelyard.composition import TermResult
from steelyard.output import Accumulation, CustomLossOutput, accumulated
from steelyard.spec import BASE

# Ends and parts of the names of metrics that are kept here; `MetricAccumulator` has the others.
_NORMS = ("grad_norm", "grad_norm_weighted")
_ENDS = ("bound", "violation")
_PARTS = ("factors/", "/custom/")


@dataclass(frozen=True)
class StepOutput:
    """Output of an optimizer step in one process.

    Attributes:
        output: of the step, without gradients.
        shares: how much the step counts in this process, for each term.
    """

    output: CustomLossOutput
    shares: Mapping[str, float]


class StepDetails:
    """What the outputs of the micro-batches of one optimizer step say beside values and weights.

    A micro-batch c counts with a factor f_c: for the base loss 1/divisor, for a term share/divisor.
    They are the shares of `Accumulation`, so that the gradient of a term in the step is Σ f_c g_c.
    With several processes only the norms of the mean gradients of each micro-batch are known, not
    these gradients: a step with several micro-batches has no norms and no cosines there.
    """

    def __init__(self) -> None:
        self._outputs: list[CustomLossOutput] = []
        self._factors: list[dict[str, float]] = []
        self._results: list[TermResult] = []
        self._accumulation = Accumulation()

    def observe(self, results: Sequence[TermResult]) -> None:
        """Keep the gradients of a micro-batch until `add`."""
        self._results = [replace(result) for result in results]

    def add(self, output: CustomLossOutput, share: float, divisor: int) -> None:
        """Add the output of a micro-batch, with the gradients that were observed."""
        results, self._results = self._results, []
        names = (BASE, *output.regularizers)
        factors = {name: (1.0 if name == BASE else share) / divisor for name in names}
        self._outputs.append(output)
        self._factors.append(factors)
        self._accumulation.add(_counted(output, factors, results), factors)

    def end_step(self) -> StepOutput | None:
        """Output of the step, None if it has no micro-batch; begins the next step."""
        outputs, factors, accumulation = self._outputs, self._factors, self._accumulation
        self.__init__()  # type: ignore[misc]
        if not outputs:
            return None
        names = dict.fromkeys(name for of_call in factors for name in of_call)
        shares = {name: math.fsum(f[name] for f in factors if name in f) for name in names}
        # The norms of a single micro-batch are those of the step, whatever its factors.
        return StepOutput(outputs[0] if len(outputs) == 1 else accumulation.output(), shares)


def metrics_of(ranks: Iterable[StepOutput | None]) -> dict[str, float]:
    """Metrics of a step of all processes, under the keys of `CustomLossOutput.metrics`.

    The batches of the processes are parts of the step's batch, as its micro-batches are: a term's
    own metrics are combined as `accumulated` does. Norms and cosines are means over the processes;
    where they are of the mean gradient, all have the same.
    """
    steps = [step for step in ranks if step is not None]
    if not steps:
        return {}
    outputs, shares = [step.output for step in steps], [step.shares for step in steps]
    whole = accumulated([_without_norms(output) for output in outputs], shares).metrics
    kept = {
        name: value
        for name, value in whole.items()
        if name.endswith(_ENDS) or any(part in name for part in _PARTS)
    }
    compared = [
        {
            name: value
            for name, value in output.metrics.items()
            if name.startswith("cosines/") or (name.endswith(_NORMS) and "/custom/" not in name)
        }
        for output in outputs
    ]
    for name in dict.fromkeys(name for of_rank in compared for name in of_rank):
        kept[name] = fmean(of_rank[name] for of_rank in compared if name in of_rank)
    return kept


def _counted(
    output: CustomLossOutput, factors: Mapping[str, float], results: Sequence[TermResult]
) -> CustomLossOutput:
    """Output of a micro-batch as it counts in its step, with the gradients of its terms."""
    rows: dict[str, list[Tensor | None]] = {}
    total: list[Tensor | None] = []
    for result in results:
        name = result.term.name
        row = [g for key in result.space for g in result.gradients.get(key, ())]
        if not row or name not in factors:
            continue
        weight = factors[name] * float(result.weight) * output.factors.get(name, 1.0)
        total = _plus(total or [None] * len(row), weight, row)
        # The gradient of a term with a lower bound is given as that of its negative.
        lower = result.bound is not None and not result.bound.upper
        rows[name] = [None if g is None else -g for g in row] if lower else row
    compared = [name for name, term in output.regularizers.items() if term.grad_norm is not None]
    compared += [BASE] * (output.base_loss.grad_norm is not None)
    if any(name not in rows for name in compared):
        output, rows, total = _without_norms(output), {}, []
    terms = {
        name: replace(term, weight=factors[name] * term.weight)
        for name, term in output.regularizers.items()
    }
    gradients = {"parameters": total}
    return replace(output, regularizers=terms, parameter_gradients=rows, extra_gradients=gradients)


def _plus(
    total: Sequence[Tensor | None], factor: float, row: Sequence[Tensor | None]
) -> list[Tensor | None]:
    return [
        x if y is None else factor * y if x is None else x + factor * y
        for x, y in zip(total, row, strict=True)
    ]


def _without_norms(output: CustomLossOutput) -> CustomLossOutput:
    terms = {
        name: replace(term, grad_norm=None, grad_norm_weighted=None)
        for name, term in output.regularizers.items()
    }
    base = replace(output.base_loss, grad_norm=None)
    return replace(output, base_loss=base, regularizers=terms, cosines={}, total_grad_norm=None)
