"""Output of a composite's last call, read from the device on access; also averaged over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch import distributed as dist

from steelyard.composition.aggregate import Combined, build_output
from steelyard.composition.ranks import sum_over_ranks
from steelyard.composition.terms import TermResult
from steelyard.errors import InputError
from steelyard.output.custom_loss import BaseLossOutput, CustomLossOutput, RegularizerOutput
from steelyard.spec.error_messages import BASE


@dataclass(eq=False)
class LazyOutput:
    """Results of one call of a composite; `output` reads their values from the device.

    Attributes:
        results: of the base loss and the terms that were due, without their graphs.
        not_run: the terms that were disabled or not due; those that had nothing to measure are not
            among them.
        combined: norms and cosines, if tracked, and factors of an aggregator.
        share: factor on the sum of the regularizers in this process.
        step: number of the step; None for a call that is not one of training.
        compiled: whether it is one of training inside of `torch.compile`.
    """

    results: Sequence[TermResult]
    not_run: tuple[str, ...] = ()
    combined: Combined | None = None
    share: float | Tensor = 1.0
    step: int | None = None
    compiled: bool = False

    @cached_property
    def output(self) -> CustomLossOutput:
        """Output of this process."""
        return self._output(None)

    def across(self, group: dist.ProcessGroup | None) -> CustomLossOutput:
        """Output averaged over the ranks of a group, each term over the ranks where it ran.

        A rank counts with its share: Σ share · value / Σ share, and the base loss, which is
        scaled already, with 1. A collective operation: every rank must call it.

        Raises:
            InputError: torch.distributed is not initialized, or the ranks have different terms.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "output_across_ranks needs torch.distributed, which is not initialized: "
                "call init_process_group, or read .output."
            )
        mine: dict[str, BaseLossOutput | RegularizerOutput] = {BASE: self.output.base_loss}
        mine |= self.output.regularizers
        names = sorted({*mine, *self.output.skipped, *self.output.not_run})
        everywhere: list[list[str] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, names, group=group)
        if any(there != names for there in everywhere):
            raise InputError(f"every rank must have the same terms, got {everywhere}.")
        share = float(self.share)
        rows = []
        for name in names:
            factor = 1.0 if name == BASE else share
            output = mine.get(name)
            weight = getattr(output, "weight", 1.0)
            rows.append((factor * output.value, factor * weight, factor) if output else (0.0,) * 3)
        summed = zip(names, sum_over_ranks(rows, group), strict=True)
        means = {
            name: (value / factor, weight / factor)
            for name, (value, weight, factor) in summed
            if factor
        }
        order = [*(name for name in mine if name in means), *sorted(set(means) - set(mine))]
        return self._output({name: means[name] for name in order})

    def _output(self, numbers: Mapping[str, tuple[float, float]] | None) -> CustomLossOutput:
        combined = self.combined or Combined()
        norm = combined.total_norm
        space = "+".join(self.results[0].space)
        return build_output(
            self.results, combined, self.not_run, numbers, total_grad_norm=norm, grad_space=space
        )
