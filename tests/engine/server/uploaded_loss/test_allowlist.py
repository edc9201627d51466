from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from torch import Tensor

from steelyard.engine.server.uploaded_loss.operations import (
    ATTRIBUTES,
    DTYPES,
    FUNCTIONS,
    METHODS,
    RESULT_FIELDS,
)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("torch.exp", torch.exp),
        ("torch.where", torch.where),
        ("torch.nn.functional.mse_loss", F.mse_loss),
        ("torch.nn.functional.kl_div", F.kl_div),
        ("operator.add", operator.add),
        ("operator.getitem", operator.getitem),
        ("math.sqrt", math.sqrt),
    ],
)
def test_functions_are_listed_by_the_name_of_the_wire(name: str, function: Any) -> None:
    assert FUNCTIONS[name] is function


def loss(logprobs: Any, weights: Any) -> Any:
    top = logprobs.sort(dim=0).values
    kept = torch.where(weights > 0, F.logsigmoid(logprobs), -logprobs)
    value = (kept * weights)[..., 1:].sum() / math.sqrt(4) + F.softplus(top).mean()
    value = value + torch.logsumexp(logprobs, dim=0) - logprobs.clamp(max=0).pow(2).mean()
    return value, {"custom/rank:sum": weights.to(torch.float32).sum() * logprobs.ndim}


def test_the_names_that_the_sdk_writes_are_listed() -> None:
    graph = encode_graph(trace_loss(loss, {"logprobs": 1, "weights": 1}, "session"))
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    assert len(calls) > 15
    for node in calls:
        if node.target == "getattr":
            assert node.args[1] in ATTRIBUTES | RESULT_FIELDS
        else:
            assert node.target in (METHODS if node.op == "call_method" else FUNCTIONS)


def test_every_method_and_attribute_belongs_to_a_tensor() -> None:
    for name in METHODS:
        assert callable(getattr(Tensor, name)), name
    for name in ATTRIBUTES:
        assert not callable(getattr(torch.zeros(2, 2), name)), name
    largest = torch.max(torch.tensor([3.0, 5.0]), 0)
    assert {name: getattr(largest, name).item() for name in RESULT_FIELDS} == {
        "values": 5.0,
        "indices": 1,
    }


def test_no_entry_works_in_place() -> None:
    """torch ends the names of in-place functions with one underscore, `operator` begins with i."""
    for name in [*FUNCTIONS, *METHODS]:
        word = name.rpartition(".")[2]
        assert not word.startswith("_"), name
        assert not word.endswith("_") or name in {"operator.and_", "operator.or_", "operator.not_"}
        assert word not in {"iadd", "isub", "imul", "ipow", "iand", "ior", "setitem", "delitem"}


@pytest.mark.parametrize(
    "word",
    ["load", "save", "eval", "exec", "open", "item", "numpy", "tolist", "backward", "apply_"],
)
def test_no_entry_reads_values_or_files(word: str) -> None:
    assert word not in METHODS
    assert not [name for name in FUNCTIONS if name.rpartition(".")[2] == word]


def test_dtypes_are_those_of_torch() -> None:
    assert all(str(dtype) == f"torch.{name}" for name, dtype in DTYPES.items())
