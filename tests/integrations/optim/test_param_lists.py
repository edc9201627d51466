"""Lists of tensors for `foreach`: aligned, bounded, of one dtype."""

from __future__ import annotations

import pytest
import torch

from steelyard.integrations.optim.param_lists import batches


def test_batches_are_bounded_aligned_and_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.integrations.optim.param_lists._CPU_BATCH_SIZE", 10)
    # The matrix of 7 rows of 3 is cut into 3, 3 and 1 rows; a row of 12 cannot be cut.
    sizes = [(4,), (5,), (3,), (7, 3), (2,), (2, 12)]
    kinds = [torch.float32] * 4 + [torch.float64, torch.float32]
    first = [torch.rand(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]
    second = [-tensor for tensor in first]
    found = list(batches(first, second))
    assert [[tuple(piece.shape) for piece in left] for left, _ in found] == [
        [(4,), (5,)],
        [(3,)],
        [(3, 3)],
        [(3, 3)],
        [(1, 3)],
        [(1, 12)],
        [(1, 12)],
        [(2,)],
    ]
    for left, right in found:
        assert len({piece.dtype for piece in left}) == 1
        for one, other in zip(left, right, strict=True):
            assert torch.equal(one, -other)
            one.zero_()  # a view: cutting copies nothing
    assert not any(tensor.any() for tensor in first)
