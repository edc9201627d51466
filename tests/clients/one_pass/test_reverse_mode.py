from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from steelyard.clients.one_pass.derivatives import NoDerivativeError
from steelyard.clients.one_pass.reverse_mode import add_gradient, evaluate_sample, sample_of
from steelyard.clients.one_pass.symbols import SymbolTracer


def symbols(inputs: dict[str, torch.Tensor]) -> tuple[fx.Graph, list[Any]]:
    graph = fx.Graph()
    tracer = SymbolTracer(graph)
    return graph, [tracer.symbol(name) for name in inputs]


def test_gradients_of_several_values_add_up() -> None:
    inputs = {"x": torch.tensor([1.0, -2.0, 3.0]), "f": torch.tensor(5.0)}
    graph, (x, factor) = symbols(inputs)
    shared = x.exp()
    first, second = shared.sum(), (shared * x).sum()
    evaluate_sample(graph, inputs)
    seeds = [(first, torch.ones_like(first)), (second, torch.ones_like(second) * factor)]
    gradient = add_gradient(seeds, x)
    evaluate_sample(graph, inputs)
    point = inputs["x"]
    # By hand: (eˣ)' + 5 (x eˣ)' = eˣ + 5 (x + 1) eˣ
    expected = point.exp() * (1 + 5 * (point + 1))
    torch.testing.assert_close(sample_of(gradient.node), expected)


def test_what_does_not_depend_on_the_leaf_has_no_gradient() -> None:
    inputs = {"x": torch.ones(3), "y": torch.ones(3)}
    graph, (x, y) = symbols(inputs)
    values = (y + x.detach()).sum()
    evaluate_sample(graph, inputs)
    with pytest.raises(NoDerivativeError, match="does not depend on the log-probs"):
        add_gradient([(values, torch.ones_like(values))], x)


def test_gradients_that_stand_in_the_graph_are_no_values() -> None:
    """A second gradient is appended after the first, whose nodes have no sample."""
    inputs = {"x": torch.tensor([2.0])}
    graph, (x,) = symbols(inputs)
    square, cube = (x * x).sum(), (x * x * x).sum()
    evaluate_sample(graph, inputs)
    found = [add_gradient([(each, torch.ones_like(each))], x) for each in (square, cube)]
    evaluate_sample(graph, inputs)
    assert [sample_of(each.node).item() for each in found] == [4.0, 12.0]
