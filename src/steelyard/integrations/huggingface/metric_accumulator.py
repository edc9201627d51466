"""Accumulate the values of terms over micro-batches, optimizer steps and processes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor
from torch import distributed as dist

from steelyard.composition import Share, TermResult
from steelyard.integrations.huggingface.step_details import StepDetails, StepOutput, metrics_of
from steelyard.spec import BASE

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
