"""Gradient centralization: subtract from each output unit's gradient its mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.integrations.optim.param_lists import Slot, batches, reduction_dtype
from steelyard.integrations.optim.sharded_sums import add_up, divides_units, unit_dimensions
from steelyard.integrations.optim.transform import Transform, Where


@dataclass(frozen=True, kw_only=True)
class _Centralize(Transform):
    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:  # noqa: ARG002
        matrices = [slot for slot in slots if slot.parameter.ndim > 1]
        shared = [slot for slot in matrices if divides_units(slot.parameter)]
        if shared:
            _centralize_shared(shared)
        whole = [slot.gradient for slot in matrices if not divides_units(slot.parameter)]
        for (gradients,) in batches(whole):
            for gradient in gradients:
                # g ← g − mean(g) over all axes but the first; `batches` cuts along the first
                # only, so a piece holds whole output units.
                axes = tuple(range(1, gradient.ndim))
                gradient.sub_(gradient.mean(axes, keepdim=True, dtype=reduction_dtype(gradient)))


def _centralize_shared(slots: Sequence[Slot]) -> None:
    """Centralize units of which this process has a part, with one reduction for all of them."""
    parameters = [slot.parameter for slot in slots]
    sums = [
        slot.gradient.sum(
            tuple(range(1, slot.gradient.ndim)), keepdim=True, dtype=reduction_dtype(slot.gradient)
        )
        for slot in slots
    ]
    totals = add_up(sums, parameters, [unit_dimensions(p) for p in parameters])
    for slot, total in zip(slots, totals, strict=True):
        slot.gradient.sub_(total / math.prod(slot.parameter.shape[1:]))


def centralize(*, where: Where | None = None) -> Transform:
    """Subtract from each output unit's gradient its mean, over all axes but the first.

    Tensors of rank 0 and 1 are left as they are.

    Args:
        where: Selects the parameters; None: all.

    Raises:
        SpecError: `where` is not a function.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, centralize
        >>> w = torch.nn.Parameter(torch.zeros(2, 2))
        >>> w.grad = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [centralize()]):
        ...     optimizer.step()
        >>> w.grad.tolist()
        [[-1.0, 1.0], [0.0, 0.0]]

    References:
        Yong et al. (2020), "Gradient centralization: a new optimization technique for deep
        neural networks".
    """
    return _Centralize(name="centralize", where=where)
