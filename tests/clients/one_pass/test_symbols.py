from __future__ import annotations

import pytest
import torch
from torch import fx

from steelyard.clients.one_pass.symbols import SymbolTracer


def test_operations_are_recorded() -> None:
    graph = fx.Graph()
    x = SymbolTracer(graph).symbol("x")
    torch.exp(x).sum()
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "call_method"]


def test_a_tensor_that_is_no_input_is_refused() -> None:
    x = SymbolTracer(fx.Graph()).symbol("x")
    with pytest.raises(TypeError, match="uses a tensor that is not among its fields"):
        x + torch.ones(3)
