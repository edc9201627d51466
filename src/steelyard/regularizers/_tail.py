"""K listed classes and one tail class that holds the remaining mass."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-8


def with_tail(logprobs: Tensor) -> Tensor:
    """`[T, K]` log-probs with a last class added: log(1 - sum of the others), at least log 1e-8.

    The listed classes and the tail are a distribution over K + 1 classes. Merging classes never
    raises a divergence, so one computed from them is a lower bound of that over all classes.
    The gradient flows through the tail: d log tail / d log p_k = -p_k / tail, and 0 at the floor.
    """
    # Summed in float64: in float32 a tail below 1e-7 would be nothing but rounding.
    rest = 1 - logprobs.double().exp().sum(-1, keepdim=True)
    tail = rest.clamp_min(FLOOR).log().to(logprobs.dtype)
    return torch.cat([logprobs, tail], dim=-1)
