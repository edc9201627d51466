"""What each term of a composite pulls: the norms of its gradient and the cosines between terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from steelyard.gradients import Pull, combine


def term_pulls(
    values: Mapping[str, Tensor], weights: Mapping[str, float], targets: Sequence[Tensor]
) -> Pull:
    """The gradients of the terms with respect to `targets`, as their norms and cosines.

    Each term is differentiated on its own, so it costs one backward pass from the loss to the
    targets for each term, and the memory of one gradient of all targets for each term. The
    graph stays for the caller's own backward pass.

    Args:
        values: scalars with their graphs, by name; those without are left out.
        weights: by name.
        targets: tensors that require a gradient.
    """
    gradients = {
        name: _flat(value, targets) for name, value in values.items() if value.requires_grad
    }
    return combine(gradients, weights, torch.zeros(1), tracked=True)


def _flat(value: Tensor, targets: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(value, targets, retain_graph=True, allow_unused=True)
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    parts = [
        torch.zeros(target.numel(), dtype=wide, device=target.device)
        if gradient is None
        else gradient.to_dense().reshape(-1).to(wide)
        for gradient, target in zip(found, targets, strict=True)
    ]
    return torch.cat(parts)
