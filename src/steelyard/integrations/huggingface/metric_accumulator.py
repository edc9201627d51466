"""Adding up what the terms were, from micro-batch to step to the next line of the log."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from steelyard.composition import Share, TermResult
from steelyard.spec import BASE

_NUMBERS = ("value", "weight", "contribution")


class MetricAccumulator:
    """The components of the loss since they were last read, scaled as the loss is.

    A micro-batch whose base loss is divided by the tokens of the whole batch has a share of the
    step; shares add up to one. Without shares, a step is the mean of its micro-batches. A value
    that is not finite counts as the mean of the others in its step.
    """

    def __init__(self) -> None:
        self._step: dict[str, list[Tensor]] = {}
        self._shared = False
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def add(self, results: Sequence[TermResult], share: Share | None) -> None:
        """One micro-batch; `share` is its part of the step, None if it has none."""
        self._shared = share is not None
        for result in results:
            if result.value is None:  # it was dropped
                continue
            value = result.value.double()
            weight = torch.as_tensor(result.weight).to(value)
            numbers = torch.stack([value, weight, weight * value])
            if share is not None and not result.term.is_base:
                numbers = numbers * share
            self._step.setdefault(result.term.name, []).append(numbers)

    def end_step(self) -> None:
        """The optimizer has stepped."""
        for name, batches in self._step.items():
            numbers = torch.stack(batches)
            finite = torch.isfinite(numbers)
            mean = numbers.where(finite, 0.0).sum(0) / finite.sum(0).clamp(min=1)
            step = mean * len(batches) if self._shared else mean
            counted = torch.cat([step, step.new_ones(1)])
            self._sums[name] = self._sums[name] + counted if name in self._sums else counted
        self._steps += bool(self._step)
        self._step = {}

    def read(self, names: Sequence[str]) -> dict[str, float]:
        """The components of all steps and processes since the last reading; then it is empty.

        Contributions are means over all steps, so that with the base loss they add up to the
        loss; values and weights are means over the steps where the term ran.

        Args:
            names: all the terms there are; the same in every process.
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
                    for key, mean in zip(_NUMBERS, means, strict=True)
                }
        return logged
