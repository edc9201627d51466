from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.clients.one_pass.loss_graph import (
    GraphTerm,
    build_graph,
    check_on_sample,
    sample_inputs,
)
from steelyard.composition.per_datum import PerDatum

TERM = GraphTerm("base", PerDatum(lambda logprobs: -logprobs), {})


def test_sample_logprobs_leave_mass_for_a_tail() -> None:
    sample = sample_inputs({"logprobs": 2, "mask": 1, "factor_0": 0})
    assert [tuple(each.shape) for each in sample.values()] == [(5, 3), (5,), ()]
    assert sample["logprobs"].exp().sum(-1).max() < 1


def test_a_graph_of_another_term_is_noticed() -> None:
    graph = build_graph([TERM], {"logprobs": 1, "mask": 1}, tracked=False)
    check_on_sample(graph, [TERM])
    other = replace(TERM, form=PerDatum(lambda logprobs: logprobs.square()))
    with pytest.raises(ValueError, match=r"traced it gives .*, and called"):
        check_on_sample(graph, [other])
