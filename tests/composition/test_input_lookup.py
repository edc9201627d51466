from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import find, gather_inputs, names_in, reads, within
from steelyard.errors import InputError


@dataclass
class Output:
    logits: Tensor
    hidden: Any = None


def test_outputs_are_opened() -> None:
    logits, hidden, labels = torch.ones(1, 2), torch.ones(3), torch.tensor([0])
    expected = {"logits": logits, "hidden": hidden, "labels": labels}
    assert gather_inputs([Output(logits, hidden)], {"labels": labels}) == expected
    assert (
        gather_inputs([{"logits": logits}, OrderedDict(hidden=hidden)], {"labels": labels})
        == expected
    )
    # One object under one name, twice, is one input.
    assert gather_inputs([Output(logits, hidden)], {"labels": labels, "logits": logits}) == expected
    with pytest.raises(InputError, match="an input must stand once, and 'logits' came twice"):
        gather_inputs([Output(logits)], {"logits": labels})
    with pytest.raises(InputError, match=r"mapping or a dataclass.* got Tensor: pass it by name"):
        gather_inputs([logits], {})
    with pytest.raises(InputError, match=r"mapping or a dataclass.* got type: pass it by name"):
        gather_inputs([Output], {})


def test_dots_lead_into_outputs() -> None:
    inputs = {"a": {"b": Output(torch.ones(1), {"c.d": 4})}, "x.y": 1, "plain": 2, "none": {}}
    assert find(inputs, "a.b.hidden.c.d") == 4
    assert find(inputs, "x.y") == 1
    for name in ("a.c", "plain.b", "a.b.hidden.c", "b"):
        with pytest.raises(KeyError):
            find(inputs, name)
    assert list(names_in(inputs)) == ["a.b.logits", "a.b.hidden.c.d", "x.y", "plain", "none"]
    loss = CompositeLoss(reads(torch.sum, "out.hidden.first"))
    assert loss(out=Output(torch.ones(1), {"first": torch.ones(3)})).item() == 3.0


def test_a_head_sees_its_own_part_and_what_all_share() -> None:
    inputs = {"a": {"x": 1}, "b": {"x": 2}, "y": {"a": 3, "b": 4}, "z": 5}
    assert within(inputs, "a") == {"a": {"x": 1}, "b": {"x": 2}, "y": 3, "z": 5, "x": 1}
    assert within(inputs, "b")["x"] == 2
