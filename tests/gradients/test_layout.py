from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import InputError
from steelyard.gradients.layout import flatten, leaf_over


def test_a_list_of_rows_becomes_one_vector_and_back() -> None:
    logprobs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    layout, flat = flatten(logprobs)
    assert flat.tolist() == [1.0, 2.0, 3.0]
    back = layout.split(flat)
    assert isinstance(back, list)
    assert [view.tolist() for view in back] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_structure_is_the_callers(kind: Any) -> None:
    layout, flat = flatten(kind([torch.zeros(2, 3), torch.zeros(4)]))
    back = layout.split(flat)
    assert type(back) is kind
    assert [tuple(view.shape) for view in back] == [(2, 3), (4,)]


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (2, 3, 4)])
def test_one_tensor_stays_one_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    layout, flat = flatten(tensor)
    assert flat.dim() == 1
    back = layout.split(flat)
    assert isinstance(back, torch.Tensor)
    assert torch.equal(back, tensor)


def test_the_vector_is_a_copy_without_a_graph() -> None:
    logprobs = [torch.zeros(2, requires_grad=True)]
    _, flat = flatten(logprobs)
    assert not flat.requires_grad
    with torch.no_grad():
        logprobs[0] += 1
    assert flat.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([], "logprobs must be a torch tensor or a list of them, one per datum, got list []."),
        ((), "logprobs must be a torch tensor or a list of them, one per datum, got tuple ()."),
        (None, "logprobs must be a torch tensor or a list of them, one per datum, got NoneType"),
        ([torch.zeros(1), [0.0]], "logprobs[1] must be a floating-point torch tensor, got list."),
        ([np.zeros(1)], "logprobs[0] must be a floating-point torch tensor, got ndarray."),
        ([torch.zeros(1), None], "logprobs[1] must be a floating-point torch tensor, got NoneType"),
        (
            torch.zeros(2, dtype=torch.int64),
            "logprobs[0] must be a floating-point torch tensor, got torch.int64.",
        ),
        (
            [torch.zeros(1), torch.zeros(1, dtype=torch.float64)],
            "all logprobs must have one dtype and device, got torch.float32 on cpu and torch",
        ),
        (
            [torch.zeros(1), torch.zeros(1, device="meta")],
            "all logprobs must have one dtype and device, got torch.float32 on cpu and torch",
        ),
    ],
)
def test_bad_logprobs(logprobs: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        flatten(logprobs)
    assert str(caught.value).startswith(message)


def test_writing_to_a_view_of_the_leaf_is_refused() -> None:
    layout, flat = flatten([torch.tensor([1.0]), torch.tensor([2.0])])
    views = layout.split(leaf_over(flat))
    with pytest.raises(RuntimeError, match="view"):
        views[0].mul_(2.0)


def test_the_leaf_lies_over_the_same_memory() -> None:
    _, flat = flatten(torch.tensor([1.0, 2.0]))
    leaf = leaf_over(flat)
    assert (leaf.is_leaf, leaf.requires_grad) == (True, True)
    assert leaf.data_ptr() == flat.data_ptr()
