"""Accumulate the values of terms over micro-batches, optimizer steps and processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from steelyard.composition import Share, TermResult
from steelyard.spec import BASE

_METRICS = ("value", "weight", "contribution")


class MetricAccumulator:
    """Mean components of the loss since the last `read`, scaled as the trainer scales the loss.

    Over the micro-batches i of a step, with term value vᵢ:

        Σᵢ shareᵢ · vᵢ    if the trainer divides the loss by the tokens of the whole step; shareᵢ is
                          the micro-batch's fraction of them, and its base loss is divided already
        (1/n) Σᵢ vᵢ       if the trainer divides the loss by the number n of micro-batches

    A value that is not finite is replaced by the mean of the others in its step. (`Trainer` filters
    the loss that it logs in a similar way, see `logging_nan_inf_filter`.)
    """

    def __init__(self) -> None:
        # All tensors are float64 and stay on the device: nothing waits for it before `read`.
        self._micro_batches: dict[str, list[Tensor]] = {}  # [3] each: value, weight, contribution
        self._has_shares = False
        self._sums: dict[str, Tensor] = {}  # [4]: the three above, and the steps of the term
        self._steps = 0

    def add(self, results: Sequence[TermResult], share: Share | None) -> None:
        """Add the results of one micro-batch.

        Args:
            results: of the base loss and the terms.
            share: the micro-batch's fraction of the tokens of the step; None if the trainer
                divides by the number of micro-batches.
        """
        self._has_shares = share is not None
        for result in results:
            if result.value is None:  # skipped after an error
                continue
            value = result.value.double()
            weight = torch.as_tensor(result.weight).to(value)
            numbers = torch.stack([value, weight, weight * value])
            if share is not None and not result.term.is_base:
                numbers = numbers * share
            self._micro_batches.setdefault(result.term.name, []).append(numbers)

    def end_step(self) -> None:
        """Close an optimizer step."""
        for name, batches in self._micro_batches.items():
            numbers = torch.stack(batches)  # [n, 3]
            finite = torch.isfinite(numbers)
            mean = numbers.where(finite, 0.0).sum(0) / finite.sum(0).clamp(min=1)
            # Shares are inside the numbers: their sum is the mean times n.
            step = mean * len(batches) if self._has_shares else mean
            with_count = torch.cat([step, step.new_ones(1)])
            self._sums[name] = self._sums[name] + with_count if name in self._sums else with_count
        self._steps += bool(self._micro_batches)
        self._micro_batches = {}

    def read(self, names: Sequence[str]) -> dict[str, float]:
        """Average all steps of all processes since the last `read`, and reset.

        Contributions are means over all steps, so that with the base loss they add up to the
        loss; values and weights are means over the steps where the term ran.

        Args:
            names: of all terms, the same in every process, which reduce one table of that many
                rows together; a term may have run on some of them only.
        """
        if not self._sums:
            return {}
        absent = torch.zeros_like(next(iter(self._sums.values())))
        rows = torch.stack([self._sums.get(name, absent) for name in (BASE, *names)])
        table = torch.cat([rows, torch.full_like(rows[:1], self._steps)])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(table)
        self._sums, self._steps = {}, 0
        (total, *_), *terms, (steps, *_) = table.tolist()
        logged = {"base_loss/value": total / steps}
        for name, (value, weight, contribution, count) in zip(names, terms, strict=True):
            if count:
                means = (value / count, weight / count, contribution / steps)
                logged |= {
                    f"regularizers/{name}/{key}": mean
                    for key, mean in zip(_METRICS, means, strict=True)
                }
        return logged
