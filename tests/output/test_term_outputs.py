from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from steelyard import BaseLossOutput, RegularizerOutput

BASE = BaseLossOutput(2.5, custom={"perplexity": 12.2})
TRACKED_BASE = BaseLossOutput(2.5, 3.14, {"perplexity": 12.2})
TERM = RegularizerOutput("l1", 22.4, 0.01, 0.224, custom={"mean": 1.4}, duration=0.5)
TRACKED_TERM = RegularizerOutput("l1", 22.4, 0.01, 0.224, 7.5, 0.075, {"mean": 1.4}, 0.5, "logits")

EACH: list[tuple[Any, dict[str, Any]]] = [
    (BASE, {"value": 2.5, "custom": {"perplexity": 12.2}}),
    (TRACKED_BASE, {"value": 2.5, "grad_norm": 3.14, "custom": {"perplexity": 12.2}}),
    (
        TERM,
        {
            "name": "l1",
            "value": 22.4,
            "weight": 0.01,
            "contribution": 0.224,
            "custom": {"mean": 1.4},
            "duration": 0.5,
        },
    ),
    (
        TRACKED_TERM,
        {
            "name": "l1",
            "value": 22.4,
            "weight": 0.01,
            "contribution": 0.224,
            "grad_norm": 7.5,
            "grad_norm_weighted": 0.075,
            "custom": {"mean": 1.4},
            "duration": 0.5,
            "grad_space": "logits",
        },
    ),
]
each = pytest.mark.parametrize(
    ("output", "values"), EACH, ids=["base", "tracked base", "term", "tracked term"]
)


@each
def test_gradient_fields_are_there_only_when_tracked(output: Any, values: dict[str, Any]) -> None:
    assert output.to_dict() == values


@each
def test_from_dict_is_the_inverse(output: Any, values: dict[str, Any]) -> None:
    assert type(output).from_dict(values) == output
    assert type(output).from_dict(json.loads(json.dumps(output.to_dict()))) == output


@each
def test_it_pickles(output: Any, values: dict[str, Any]) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(output, protocol)) == output


@each
def test_it_is_frozen(output: Any, values: dict[str, Any]) -> None:
    with pytest.raises(FrozenInstanceError):
        output.value = 0.0
    assert output.to_dict() == values


@each
def test_the_mapping_is_a_copy(output: Any, values: dict[str, Any]) -> None:
    output.to_dict()["custom"]["invented"] = 1.0
    assert output.to_dict() == values


def test_a_gradient_of_zero_is_tracked() -> None:
    assert BaseLossOutput(1.0, 0.0).to_dict()["grad_norm"] == 0.0
    term = RegularizerOutput("l1", 1.0, 0.0, 0.0, 0.0, 0.0).to_dict()
    assert (term["grad_norm"], term["grad_norm_weighted"], term["grad_space"]) == (
        0.0,
        0.0,
        "logprobs",
    )


def test_outputs_differ_by_value() -> None:
    assert BASE != TRACKED_BASE
    assert TERM != TRACKED_TERM
    assert BaseLossOutput(2.5, custom={"perplexity": 12.3}) != BASE


def test_another_gradient_space_survives_also_untracked() -> None:
    output = RegularizerOutput("a", 1.0, 1.0, 1.0, grad_space="logits")
    assert RegularizerOutput.from_dict(output.to_dict()) == output
