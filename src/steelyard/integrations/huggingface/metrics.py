"""Metrics of terms over micro-batches, optimizer steps and processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor
from torch import distributed as dist

from steelyard.composition.composite import Share
from steelyard.composition.terms import TermResult
from steelyard.output.accumulated import Accumulation, accumulated
from steelyard.output.custom_loss import CustomLossOutput, without_norms
from steelyard.spec.error_messages import BASE

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
    """Norms, cosines and own metrics of the micro-batches of one optimizer step.

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
    whole = accumulated([without_norms(output) for output in outputs], shares).metrics
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
        output, rows, total = without_norms(output), {}, []
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


_METRICS = ("value", "weight", "contribution")


class MetricAccumulator:
    """Mean components of the loss since the last `read`; they add up to the loss that is logged.

    A micro-batch counts in the logged loss with a factor f: for the base loss 1/divisor, for a term
    share/divisor (see `MicroBatch`). Over the micro-batches i of all steps, with value vᵢ and
    weight wᵢ of a term:

        value         Σᵢ fᵢ · vᵢ / Σᵢ fᵢ
        weight        Σᵢ fᵢ · wᵢ / Σᵢ fᵢ
        contribution  Σᵢ fᵢ · wᵢ · vᵢ / steps

    A value that is not finite is replaced by the mean of the others in its step. (`Trainer` filters
    the loss that it logs in a similar way, see `logging_nan_inf_filter`.)

    The other metrics of a step (norms, cosines, a term's own) are those of its whole batch, and
    means over the steps that have them.

    Attributes:
        details: those of the current step.
    """

    def __init__(self) -> None:
        # All tensors are float64 and stay on the device: nothing waits for it before `read`.
        # [4] each: f · value, f · weight, f · weight · value, f.
        self._micro_batches: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._steps = 0
        self.details = StepDetails()
        self._detailed: list[StepOutput | None] = []

    def add(self, results: Sequence[TermResult], share: Share = 1.0, divisor: int = 1) -> None:
        """Add the results of one micro-batch.

        Args:
            results: of the base loss and the terms.
            share: factor on the terms.
            divisor: number that the trainer divides base loss and terms by.
        """
        for result in results:
            if result.value is None or not result.ran:
                continue
            value = result.value.double()
            weight = torch.as_tensor(result.weight).to(value)
            factor = value.new_tensor(1.0) if result.term.is_base else torch.as_tensor(share)
            # A weight is negative under a lower bound; the multiplier is logged.
            numbers = torch.stack([value, weight.abs(), weight * value, torch.ones_like(value)])
            numbers = numbers * factor.to(value) / divisor
            self._micro_batches.setdefault(result.term.name, []).append(numbers)

    @property
    def is_empty(self) -> bool:
        """Whether the current step has no micro-batch."""
        return not self._micro_batches

    def end_step(self) -> None:
        """Close an optimizer step."""
        for name, batches in self._micro_batches.items():
            numbers = torch.stack(batches)  # [n, 4]
            factors = numbers[:, 3:]
            finite = torch.isfinite(numbers)
            counted = factors.where(finite, 0.0).sum(0)
            step = numbers.where(finite, 0.0).sum(0) * (factors.sum(0) / counted.clamp(min=1e-300))
            self._sums[name] = self._sums[name] + step if name in self._sums else step
        self._detailed.append(self.details.end_step())
        self._steps += bool(self._micro_batches)
        self._micro_batches = {}

    def read(self, names: Sequence[str]) -> dict[str, float]:
        """Average all steps of all processes since the last `read`, and reset.

        Contributions are means over all steps, so that with the base loss they add up to the
        loss; values and weights are means over the micro-batches where the term ran.

        Args:
            names: of all terms, the same in every process, which reduce one table of that many
                rows together; a term may have run on some of them only.
        """
        if not self._sums:
            return {}
        absent = torch.zeros_like(next(iter(self._sums.values())))
        rows = torch.stack([self._sums.get(name, absent) for name in (BASE, *names)])
        table = torch.cat([rows, torch.full_like(rows[:1], self._steps)])
        steps_of_ranks: list[list[StepOutput | None]] = [self._detailed]
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(table)
            steps_of_ranks *= dist.get_world_size()
            dist.all_gather_object(steps_of_ranks, self._detailed)
        self._sums, self._steps, self._detailed = {}, 0, []
        (total, *_), *terms, (steps, *_) = table.tolist()
        logged = {"base_loss/value": total / steps}
        for name, (value, weight, contribution, factors) in zip(names, terms, strict=True):
            if factors:
                means = (value / factors, weight / factors, contribution / steps)
                logged |= {
                    f"regularizers/{name}/{key}": mean
                    for key, mean in zip(_METRICS, means, strict=True)
                }
        detailed = [metrics_of(ranks) for ranks in zip(*steps_of_ranks, strict=True)]
        keys = dict.fromkeys(key for step in detailed for key in step)
        return logged | {key: fmean(step[key] for step in detailed if key in step) for key in keys}
