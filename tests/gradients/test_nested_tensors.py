from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from steelyard.gradients.layout import fields_of, filled, leaves_of, mapped, tensors_in

A, B = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])


def test_a_nest_keeps_its_shape() -> None:
    nest = {"x": [A, {3: B}], "y": (A,)}
    assert [t.tolist() for t in tensors_in(nest)] == [A.tolist(), B.tolist()]
    doubled = mapped(nest, lambda tensor: tensor * 2)
    assert doubled["x"][1][3].tolist() == [[0.0], [8.0]]
    assert isinstance(doubled["x"], list)
    assert isinstance(doubled["y"], tuple)


class Pair(NamedTuple):
    first: Tensor
    second: object


def test_a_named_tuple_stays_one_and_anything_else_is_left_as_it_is() -> None:
    thing = object()
    nest = Pair(A, ["text", 3, thing, None, Pair])
    found = mapped(nest, lambda tensor: tensor + 1)
    assert isinstance(found, Pair)
    assert found.first.tolist() == [4.0, 1.0]
    assert found.second == ["text", 3, thing, None, Pair]
    assert list(tensors_in(nest)) == [A]


def test_things_of_another_kind_can_be_replaced() -> None:
    assert mapped({"x": [A, "a", ("b",)]}, str.upper, str) == {"x": [A, "A", ("B",)]}


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


@dataclass(frozen=True, slots=True)
class Checked:
    """It checks its arguments, and has a tensor that is none of them."""

    x: Tensor
    squared: Tensor = field(init=False)
    y: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "squared", self.x.square())


def test_every_field_of_a_dataclass_is_replaced_and_nothing_is_computed_anew() -> None:
    nest = [Checked(torch.tensor(3.0), torch.tensor(1.0))]
    assert [t.item() for t in tensors_in(nest)] == [3.0, 9.0, 1.0]
    (named,) = filled(nest, ["x", "squared", "y"])
    assert isinstance(named, Checked)
    assert fields_of(named) == {"x": "x", "squared": "squared", "y": "y"}
    (leaves,) = leaves_of(nest)
    assert leaves.squared.is_leaf
    assert nest[0].squared.item() == 9.0


def test_values_in_the_places_of_tensors() -> None:
    nest = {"x": [A, B], "y": (A, 3)}
    assert filled(nest, ["a", None]) == {"x": ["a", None], "y": ("a", 3)}


def test_fields() -> None:
    proxy: Mapping[str, int] = MappingProxyType({"a": 1})
    assert fields_of(proxy) == {"a": 1}
    assert fields_of(Layer(A)) == {"weight": A, "bias": None}
    for neither in (Layer, A, [A], None, "text"):
        assert fields_of(neither) is None


def test_what_requires_no_gradient_beside_what_does_is_a_constant() -> None:
    free = A.clone().requires_grad_()
    leaf, constant = leaves_of([free, B])
    assert (leaf.requires_grad, constant.requires_grad) == (True, False)
    assert leaf is not free
    assert all(each.requires_grad for each in leaves_of([A, B]))
