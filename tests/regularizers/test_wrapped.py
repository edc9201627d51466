from __future__ import annotations

from typing import Any

import pytest
import torch

from steelyard.errors import RegistryError, SpecError
from steelyard.regularizers import L1
from steelyard.regularizers._wrapped import build_wrapped

from .training import nll


def scaled(data: Any, logprobs: list[torch.Tensor], scale: float) -> torch.Tensor:
    return scale * torch.cat(logprobs).abs().mean()


def test_what_is_built() -> None:
    own = L1()
    assert build_wrapped(own, "outer") == (own, {})
    assert build_wrapped(nll, "outer") == (nll, {})
    assert build_wrapped({"fn": own, "options": None}, "outer") == (own, {})
    for described in ("l1", {"fn": "l1"}, {"fn": "l1", "options": {"of": "logprobs"}}):
        assert build_wrapped(described, "outer") == (L1(of="logprobs"), {})


def test_options_of_a_function_are_those_of_its_calls() -> None:
    described = {"fn": scaled, "options": {"scale": 2.0}}
    assert build_wrapped(described, "outer") == (scaled, {"scale": 2.0})


FIELDS = "regularizer must have the fields 'fn' and, if need be, 'options', got"


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (3, "regularizer must be a regularizer, or the name of one, got 3"),
        ({"options": {}}, f"{FIELDS} ['options']"),
        ({"fn": "l1", "weight": 1}, f"{FIELDS} ['fn', 'weight']"),
        (
            {"fn": nll, "options": {"a": 1}},
            (
                "regularizer must accept (data, logprobs) and the options ['a']: "
                "got an unexpected keyword argument 'a'; its options are none"
            ),
        ),
    ],
)
def test_invalid_wrapped_regularizers(described: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_wrapped(described, "outer")
    assert str(caught.value) == f"{message} (regularizer 'outer')."


def test_an_unregistered_name() -> None:
    with pytest.raises(RegistryError, match="no regularizer is registered as 'l3'"):
        build_wrapped("l3", "outer")
