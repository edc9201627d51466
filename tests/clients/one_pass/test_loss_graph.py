from __future__ import annotations

import inspect

import torch

from steelyard.clients.one_pass.loss_graph import GraphTerm, build_graph
from steelyard.composition.per_datum import PerDatum

TERM = GraphTerm("base", PerDatum(lambda logprobs: -logprobs), {})


def test_the_function_has_the_inputs_as_parameters() -> None:
    graph = build_graph([TERM], {"logprobs": 1, "mask": 1}, tracked=False)
    function = graph.function()
    assert list(inspect.signature(function).parameters) == ["logprobs", "mask", "factor_0"]
    logprobs = torch.tensor([-1.0, -2.0])
    loss, metrics = function(logprobs, torch.tensor([0.0, 1.0]), torch.tensor(3.0))
    assert loss.item() == 6.0
    assert {key: value.item() for key, value in metrics.items()} == {"custom/v/0:sum": 2.0}


def test_equal_graphs_have_equal_keys() -> None:
    ranks = {"logprobs": 1, "mask": 1}
    first, second = (build_graph([TERM], ranks, tracked=False) for _ in range(2))
    assert first.key == second.key
    assert build_graph([TERM], ranks, tracked=True).key != first.key
    assert build_graph([TERM], {**ranks, "logprobs": 2}, tracked=False).key != first.key


def test_sums_count_the_tokens_of_the_mask() -> None:
    form = PerDatum(lambda logprobs: logprobs.square(), gradient_of=lambda logprobs: logprobs)
    logprobs, mask = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([1.0, 0.0])
    sums = GraphTerm("x", form, {}).sums(logprobs, mask, {})
    assert [each.item() for each in sums] == [5.0, -3.0]
