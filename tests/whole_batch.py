"""Compare the tensors of several processes with those of one process on the whole batch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor | None) -> Tensor:
    """A copy of a tensor that may be sharded; every process has to call it."""
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def assert_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Check that each tensor differs by at most 1e-6 of its norm: sums are in another order."""
    for mine, other in zip(found, expected, strict=True):
        assert mine.shape == other.shape
        difference, norm = (mine - other).norm().item(), other.norm().item()
        assert difference <= 1e-6 * norm + 1e-8, f"{difference} of {norm}"
