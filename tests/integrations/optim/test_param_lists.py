"""Parameters with their gradients, and lists of tensors for `foreach`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.errors import InputError
from steelyard.integrations.optim.transform import (
    Slot,
    batches,
    reduction_dtype,
    select,
    slots_of,
    split_large,
    with_gradients,
)


def test_batches_are_bounded_aligned_and_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.integrations.optim.transform._CPU_BATCH_SIZE", 10)
    # The matrix of 7 rows of 3 is split into 3, 3 and 1 rows; a row of 12 cannot be split.
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
            one.zero_()  # a view: splitting copies nothing
    assert not any(tensor.any() for tensor in first)


def test_split_large_cuts_all_tensors_at_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.integrations.optim.transform._CPU_BATCH_SIZE", 6)
    matrix, vector = torch.arange(15.0).reshape(5, 3), torch.arange(5.0)
    found = [(left.tolist(), right.tolist()) for left, right in split_large(matrix, vector)]
    assert found == [
        ([[0, 1, 2], [3, 4, 5]], [0, 1]),
        ([[6, 7, 8], [9, 10, 11]], [2, 3]),
        ([[12, 13, 14]], [4]),
    ]
    assert [pair[0] is vector for pair in split_large(vector)] == [True]


def test_slots_are_labelled_by_name_or_by_place() -> None:
    model = torch.nn.Linear(3, 2)
    named = slots_of(torch.optim.SGD(list(model.named_parameters()), lr=0.5))
    assert [slot.label for slot in named] == ["weight", "bias"]
    assert named[0].parameter is model.weight
    assert named[0].group["lr"] == 0.5
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    assert [slot.label for slot in slots_of(torch.optim.SGD(groups, lr=0.5))] == [
        "parameter 0 of group 0, shape (2, 3)",
        "parameter 0 of group 1, shape (2,)",
    ]


def slots_with(*gradients: Tensor | None) -> list[Slot]:
    found = []
    for index, gradient in enumerate(gradients):
        parameter = torch.nn.Parameter(torch.ones(3, 2))
        parameter.grad = gradient
        found.append(Slot(parameter, {}, f"p{index}"))
    return found


def test_with_gradients_drops_parameters_without_one_and_coalesces_sparse_ones() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    rows = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), values, (3, 2), check_invariants=True)
    dense, without, sparse = slots_with(torch.ones(3, 2), None, rows)
    found = with_gradients([dense, without, sparse])
    assert [slot.label for slot in found] == ["p0", "p2"]
    assert dense.rows is None
    assert sparse.rows is not None
    assert sparse.rows.tolist() == [0, 2]
    assert sparse.gradient.tolist() == [[3.0, 4.0], [6.0, 8.0]]
    sparse.gradient.mul_(2)
    assert sparse.parameter.grad is not None
    assert sparse.parameter.grad.to_dense().tolist() == [[6.0, 8.0], [0.0, 0.0], [12.0, 16.0]]


def test_with_gradients_raises_without_any() -> None:
    message = r"got none for any of its 2 parameters \(p0; p1\): call loss\.backward\(\) before"
    with pytest.raises(InputError, match=message):
        with_gradients(slots_with(None, None))


def test_select_calls_where_with_each_parameter() -> None:
    slots = slots_with(None, None)
    assert select(slots, None) == slots
    assert select(slots, lambda p: p is slots[1].parameter) == [slots[1]]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_reduction_dtype_is_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert reduction_dtype(torch.ones(1, dtype=dtype)) == expected
