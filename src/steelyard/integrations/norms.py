"""What each term of a composite pulls: the norms of its gradient and the cosines between terms."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from steelyard.gradients import Pull, combine
from steelyard.integrations.reading import Reading, wide


def term_pulls(readings: Sequence[Reading], targets: Sequence[Tensor]) -> Pull:
    """The gradients of the terms with respect to `targets`, as their norms and cosines.

    Each term is differentiated on its own, so it costs one backward pass from the loss to the
    targets for each term, and the memory of one gradient of all targets for each term. The
    graph stays for the caller's own backward pass.

    Args:
        readings: the terms with their graphs; those without are left out.
        targets: tensors that require a gradient.
    """
    gradients, weights = {}, {}
    for reading in readings:
        if reading.value.requires_grad:
            began = perf_counter()
            name = reading.term.name
            gradients[name] = _flat(reading.value, targets)
            weights[name] = float(reading.weight)
            if reading.gradient_duration is None:
                reading.gradient_duration = perf_counter() - began
    return combine(gradients, weights, torch.zeros(1), tracked=True)


def _flat(value: Tensor, targets: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(value, targets, retain_graph=True, allow_unused=True)
    dtype = wide(value.dtype)
    parts = [
        torch.zeros(target.numel(), dtype=dtype, device=target.device)
        if gradient is None
        else gradient.to_dense().reshape(-1).to(dtype)
        for gradient, target in zip(found, targets, strict=True)
    ]
    return torch.cat(parts)
