from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from steelyard.gradients import (
    Gradients,
    Question,
    combine_beyond,
    evaluate,
    flatten,
    mapped,
    tensors_in,
)
from steelyard.gradients.beyond import leaves_of

A, B = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])


def test_a_nest_keeps_its_shape() -> None:
    nest = {"x": [A, {3: B}], "y": (A,)}
    assert [t.tolist() for t in tensors_in(nest)] == [A.tolist(), B.tolist()]
    doubled = mapped(nest, lambda tensor: tensor * 2)
    assert doubled["x"][1][3].tolist() == [[0.0], [8.0]]
    assert isinstance(doubled["y"], list)


def test_leaves_share_memory_and_require_a_gradient() -> None:
    with torch.no_grad():
        (leaf,) = leaves_of([A])
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert leaf.data_ptr() == A.data_ptr()


@dataclass(frozen=True)
class Layer:
    weight: Tensor
    bias: Tensor | None = None


def test_a_dataclass_is_a_nest_of_its_fields_and_a_shared_tensor_is_one() -> None:
    nest = [Layer(A, B), Layer(A), {"alone": B}]
    assert [t.tolist() for t in tensors_in(nest)] == [A.tolist(), B.tolist()]
    first, second, third = leaves_of(nest)
    assert first.weight is second.weight
    assert first.bias is third["alone"]
    assert second.bias is None
    gradients = mapped(nest, lambda tensor: None if tensor is B else tensor + 1)
    assert gradients[0].bias is None
    assert gradients[1].weight.tolist() == [4.0, 1.0]


def test_what_requires_no_gradient_beside_what_does_is_a_constant() -> None:
    free = A.clone().requires_grad_()
    leaf, constant = leaves_of([free, B])
    assert (leaf.requires_grad, constant.requires_grad) == (True, False)
    assert leaf is not free
    assert all(each.requires_grad for each in leaves_of([A, B]))


def scaled(data: object, logprobs: object, layers: list[Layer]) -> Tensor:
    return torch.stack([(each.weight * (i + 1)).sum() for i, each in enumerate(layers)]).sum()


def test_a_shared_tensor_is_differentiated_once() -> None:
    flat = torch.zeros(2)
    layout = flatten([flat])[0]
    weight = A.clone().requires_grad_()
    layers = [Layer(weight, B), Layer(weight)]
    beyond = {"layers": layers, "others": layers}
    fn = lambda d, lp, layers, others: scaled(d, lp, layers)  # noqa: E731
    question = Question("t", fn, {}, "auto", None, layout, flat, beyond=beyond)
    found = evaluate(question).beyond
    assert [None if g is None else g.tolist() for g in found["layers"]] == [[3.0, 3.0], None]
    assert list(found["others"]) == [None, None]


def test_weighted_sums_by_need() -> None:
    gradients: dict[str, Gradients] = {
        "one": {"logits": [A, None]},
        "two": {"logits": [A, None], "parameters": [B]},
    }
    pull = combine_beyond(gradients, {"one": 2.0, "two": 0.5}, tracked=False)
    total, nothing = pull.totals["logits"]
    assert total is not None
    assert total.tolist() == [7.5, 0.0]
    assert nothing is None
    assert [t.tolist() for t in pull.totals["parameters"] if t is not None] == [[[0.0], [2.0]]]
    assert (pull.norms, pull.cosines) == ({}, {})
    assert A.tolist() == [3.0, 0.0]


def test_norms_and_cosines_within_a_space() -> None:
    gradients: dict[str, Gradients] = {
        "one": {"logits": [A, B]},
        "two": {"logits": [A, None]},
        "wide": {"logits": [A, None], "parameters": [B]},
    }
    weights = dict.fromkeys(gradients, 1.0)
    pull = combine_beyond(gradients, weights, tracked=True)
    assert pull.norms == {"one": 5.0, "two": 3.0, "wide": 5.0}
    assert pull.cosines == {("one", "two"): pytest.approx(9 / 15)}


def test_half_precision_is_summed_in_float32_and_double_in_double() -> None:
    half = torch.full((4096,), 0.1, dtype=torch.bfloat16)
    exact = math.sqrt(4096) * half[0].item()
    pull = combine_beyond({"t": {"logits": [half]}}, {"t": 1.0}, tracked=True)
    assert pull.norms["t"] == pytest.approx(exact, rel=1e-6)
    double = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    other = torch.tensor([0.0, 1.0], dtype=torch.float64)
    gradients = {"a": {"logits": [double]}, "b": {"logits": [other]}}
    pull = combine_beyond(gradients, {"a": 1.0, "b": 1.0}, tracked=True)
    assert pull.cosines["a", "b"] == pytest.approx(1e-9)
