"""Names of the fields of a batch, and of several sources."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from steelyard.errors import InputError
from steelyard.integrations.lightning.steps import batch_fields, merge_sources


@dataclass
class Fields:
    x: int
    y: int


Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - as default_collate leaves it


@pytest.mark.parametrize(
    ("batch", "names", "expected"),
    [
        ({"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
        (Fields(1, 2), (), {"x": 1, "y": 2}),
        (Pair(1, 2), (), {"x": 1, "y": 2}),
        (Pair(1, 2), ("a", "b"), {"a": 1, "b": 2}),
        ((1, 2), ("x", "y"), {"x": 1, "y": 2}),
        ([1, 2], (), {"batch.0": 1, "batch.1": 2}),
        (1, (), {"batch": 1}),
        (1, ("x",), {"x": 1}),
    ],
)
def test_fields_of_a_batch(batch: Any, names: tuple[str, ...], expected: Any) -> None:
    assert batch_fields(batch, names) == expected


def test_more_items_than_names_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"name each item of a batch, got 1 names \(x\) for 2 items"
    ):
        batch_fields((1, 2), ("x",))


def test_several_names_for_one_tensor_are_refused() -> None:
    with pytest.raises(InputError, match=r"got 2 names \(x, y\) for 1 items"):
        batch_fields(torch.ones(3), ("x", "y"))


def test_a_name_with_two_values_gets_its_source() -> None:
    shared, mine, yours = object(), object(), object()
    found = merge_sources({"batch": {"a": shared, "b": mine}, "outputs": {"a": shared, "b": yours}})
    assert found == {"a": shared, "batch.b": mine, "outputs.b": yours}
