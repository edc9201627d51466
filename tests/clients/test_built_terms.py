"""Terms by registry names: the same object from call to call while its options are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.clients.term_states import BuiltTerms

FN = f"{__name__}:Scaled"


class Scaled:
    """A term with options of many kinds."""

    name = "scaled"

    def __init__(self, scale: Any = 1.0, **others: Any) -> None:
        self.scale, self.others = scale, others

    def compute(self, data: Any, logprobs: Any) -> Tensor:
        return torch.as_tensor(self.scale).sum() * torch.cat(list(logprobs)).sum()


def described(**options: Any) -> dict[str, Any]:
    return {"fn": FN, "weight": 0.1, "options": options}


def test_equal_options_give_the_same_object() -> None:
    terms = BuiltTerms()
    first = terms.spec_of(described(scale=2.0))
    again = terms.spec_of({**described(scale=2.0), "weight": 0.5})
    assert again.fn is first.fn
    assert again.weight == 0.5
    assert terms.spec_of(described(scale=3.0)).fn is not first.fn
    assert terms.spec_of({**described(scale=3.0), "name": "other"}).fn is not first.fn


def test_a_spec_and_a_function_are_taken_as_they_are() -> None:
    terms, fn = BuiltTerms(), Scaled()
    spec = RegularizerSpec(fn, 0.1)
    assert terms.spec_of(spec) is spec
    assert terms.spec_of({"fn": fn, "weight": 0.2}).fn is fn


@pytest.mark.parametrize("place", ["scale", "others"])
def test_options_that_were_changed_in_place_give_another_object(place: str) -> None:
    term = described(scale=2.0, others={"list": [1, 2]})
    terms = BuiltTerms()
    first = terms.spec_of(term)
    if place == "scale":
        term["options"]["scale"] = 3.0
    else:
        term["options"]["others"]["list"].append(3)
    again = terms.spec_of(term)
    assert again.fn is not first.fn
    assert again.fn.scale == term["options"]["scale"]


@pytest.mark.parametrize(
    ("before", "same", "other"),
    [
        (torch.ones(2), torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(2), torch.ones(3)),
        (np.ones(2), np.ones(2), np.zeros(2)),
        (np.ones(2), np.ones(2), torch.ones(2)),
        ([torch.ones(2), 1], [torch.ones(2), 1], [torch.ones(2), 2]),
        ({"a": np.ones(2)}, {"a": np.ones(2)}, {"b": np.ones(2)}),
        ((1, 2), (1, 2), (1, 2, 3)),
    ],
)
def test_tensors_and_arrays_in_options_are_compared_by_value(
    before: Any, same: Any, other: Any
) -> None:
    terms = BuiltTerms()
    first = terms.spec_of(described(given=before))
    assert terms.spec_of(described(given=same)).fn is first.fn
    assert terms.spec_of(described(given=other)).fn is not first.fn
