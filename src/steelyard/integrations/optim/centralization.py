"""Gradients with mean zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.integrations.optim.param_lists import Slot, batches, wide
from steelyard.integrations.optim.transform import Transform, Where


@dataclass(frozen=True, kw_only=True)
class _Centralize(Transform):
    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:  # noqa: ARG002
        matrices = [slot.gradient for slot in slots if slot.parameter.ndim > 1]
        for (gradients,) in batches(matrices):
            for gradient in gradients:
                axes = tuple(range(1, gradient.ndim))
                gradient.sub_(gradient.mean(axes, keepdim=True, dtype=wide(gradient)))


def centralize(*, where: Where | None = None) -> Transform:
    """Subtract from each output unit's gradient its mean: over all axes but the first.

    Tensors of rank 0 and 1 are left as they are.

    Args:
        where: Which parameters.

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
