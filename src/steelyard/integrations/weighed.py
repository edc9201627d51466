"""What came of a whole call of a composite, as numbers when somebody asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch import distributed as dist

from steelyard.errors import InputError
from steelyard.gradients import Pull
from steelyard.gradients.returned import split_metrics
from steelyard.integrations.reading import Reading
from steelyard.output import BaseLossOutput, CustomLossOutput, RegularizerOutput


@dataclass(eq=False)
class Weighed:
    """The terms of one call, weighed.

    Attributes:
        readings: the base loss and the regularizers that ran, without their graphs.
        skipped: the terms that failed, and why.
        not_run: the terms that were disabled or not due.
        pull: norms and cosines, if tracked.
        space: what the norms are with respect to.
    """

    readings: Sequence[Reading]
    skipped: Mapping[str, str] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()
    pull: Pull | None = None
    space: str = "inputs"

    @cached_property
    def numbers(self) -> dict[str, tuple[float, float]]:
        """Value and weight of each term by name: the one time the device is waited for."""
        names = [reading.term.name for reading in self.readings]
        values = _as_floats([reading.value.detach() for reading in self.readings])
        weights = _as_floats([reading.weight for reading in self.readings])
        return dict(zip(names, zip(values, weights, strict=True), strict=True))

    @cached_property
    def output(self) -> CustomLossOutput:
        """The numbers of this process."""
        return self._output(self.numbers)

    def across(self, group: dist.ProcessGroup | None) -> CustomLossOutput:
        """The numbers of all processes of a group, each term averaged over those where it ran.

        Every process must call it.

        Raises:
            InputError: there are no processes to speak of, or they have different terms.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "output_across_ranks needs torch.distributed, which is not initialized: "
                "call init_process_group, or read .output."
            )
        names = sorted({*self.numbers, *self.skipped, *self.not_run})
        self._check_same(names, group)
        ran = [(*self.numbers[name], 1.0) if name in self.numbers else (0.0,) * 3 for name in names]
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        total = torch.tensor(ran, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group)
        means = {
            name: (value / count, weight / count)
            for name, (value, weight, count) in zip(names, total.tolist(), strict=True)
            if count
        }
        return self._output({name: means[name] for name in self._order(means)})

    def _check_same(self, names: list[str], group: dist.ProcessGroup | None) -> None:
        everywhere: list[list[str] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, names, group=group)
        if any(there != names for there in everywhere):
            raise InputError(f"every rank must have the same terms, got {everywhere}.")

    def _order(self, means: Mapping[str, object]) -> list[str]:
        mine = [reading.term.name for reading in self.readings]
        return [*(name for name in mine if name in means), *sorted(set(means) - set(mine))]

    def _output(self, numbers: Mapping[str, tuple[float, float]]) -> CustomLossOutput:
        mine = {reading.term.name: reading for reading in self.readings}
        norms = self.pull.norms if self.pull is not None else {}
        base = BaseLossOutput(0.0)
        regularizers = {}
        for name, (value, weight) in numbers.items():
            reading = mine.get(name)
            custom = split_metrics(name, (None, reading.custom))[1] if reading else {}
            norm = norms.get(name)
            if reading is not None and reading.term.is_base:
                base = BaseLossOutput(value, norm, custom)
                continue
            regularizers[name] = RegularizerOutput(
                name=name,
                value=value,
                weight=weight,
                contribution=weight * value,
                grad_norm=norm,
                grad_norm_weighted=None if norm is None else weight * norm,
                custom=custom,
                duration=reading.duration if reading is not None else 0.0,
                grad_space=self.space,
            )
        total = math.fsum(r.contribution for r in regularizers.values())
        return CustomLossOutput(
            loss_total=base.value + total,
            base_loss=base,
            regularizers=regularizers,
            regularizer_total=total,
            total_grad_norm=self.pull.total_norm if self.pull is not None else None,
            cosines=self.pull.cosines if self.pull is not None else {},
            skipped={name: why for name, why in self.skipped.items() if name not in numbers},
            not_run=tuple(name for name in self.not_run if name not in numbers),
        )


def _as_floats(numbers: Sequence[float | Tensor]) -> list[float]:
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    if not tensors:
        return [float(number) for number in numbers]
    device = tensors[0].device
    floats: list[float] = torch.stack([tensor.to(device) for tensor in tensors]).tolist()
    return floats
