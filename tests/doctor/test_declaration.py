"""Declared terms: a config that tells the doctor what the specs tell it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steelyard import penalties, regularizers
from steelyard.doctor.declaration import declared_terms
from steelyard.doctor.facts import TermFacts
from steelyard.integrations import term
from steelyard.penalties import from_logits
from steelyard.schedules import join, linear, piecewise, warmup
from steelyard.spec.regularizer import RegularizerSpec


class Judge:
    name = "judge"

    def compute(self, data: object, logprobs: object, **options: object) -> float:
        return 0.0


def own(hidden: Any) -> Any:
    return hidden.sum()


SPECS = [
    RegularizerSpec(regularizers.KLToReference(), at_most=0.3, every=2),
    RegularizerSpec(regularizers.KLToReference(reference="logprobs"), 0.1),
    RegularizerSpec(regularizers.L2(), 0.1, data=[1, 2, 3], per_step=2),
    RegularizerSpec(regularizers.Entropy(), at_least=warmup(0.5, 10), gradient="none"),
    RegularizerSpec(regularizers.L1(reduction="sum"), 0.1, enabled=False),
    RegularizerSpec(regularizers.WholeVocabulary(kind="kl"), 0.1),
    RegularizerSpec(regularizers.WholeVocabulary(kind="entropy"), 0.1),
    RegularizerSpec(regularizers.Adaptive(regularizer="kl_to_reference", target=0.1), 0.1),
    RegularizerSpec(
        regularizers.Adaptive(regularizer=regularizers.WholeVocabulary(kind="kl"), target=0.1), 0.1
    ),
    RegularizerSpec(regularizers.Adaptive(regularizer=Judge(), target=0.1), linear(0, 1, 5)),
    RegularizerSpec(regularizers.DemographicParity(test="none"), 0.1, anchor=True),
    RegularizerSpec(
        Judge(), at_most=0, scale=2.0, run_in="process", options={"a": 1, "b": [object()]}
    ),
    term(own, 0.1, "small", inputs="hidden"),
    term(regularizers.L2(), 0.1, inputs=("data", "logprobs")),
    term(penalties.kl_divergence, 0.1, "kl", inputs=("student", "teacher")),
    term(from_logits.js, 0.1, "js", inputs=("logits", "reference_logits")),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_doctor_reads_in_the_declaration_what_it_reads_in_the_spec(
    spec: RegularizerSpec,
) -> None:
    (entry,) = json.loads(json.dumps(declared_terms([spec])))
    assert TermFacts.of_config(entry) == TermFacts.of(spec)


def test_a_divergence_of_two_named_inputs_is_a_restraint() -> None:
    restraints = {spec.name for spec in SPECS if TermFacts.of(spec).restraint}
    assert {"kl", "js"} < restraints
    assert "small" not in restraints


@pytest.mark.parametrize(
    ("weight", "declared"),
    [
        (0.1, 0.1),
        (warmup(0.5, 10), {"linear": [0.0, 0.5, 10]}),
        (piecewise({0: 0.1}), {"schedule": "steelyard.spec.schedules:_Piecewise"}),
        (join({0: warmup(0.5, 10)}), {"schedule": "steelyard.spec.schedules:_Join"}),
        (own, {"schedule": f"{__name__}:own"}),
    ],
)
def test_weights_are_declared_as_in_a_config_where_it_has_a_form(
    weight: Any, declared: Any
) -> None:
    (entry,) = declared_terms([RegularizerSpec(Judge(), weight)])
    assert entry["weight"] == declared
    assert entry["use"] == f"{__name__}:Judge"


def test_options_that_json_cannot_hold_are_left_out() -> None:
    (entry,) = declared_terms([SPECS[11]])
    assert entry["options"] == {"a": 1}
    assert entry["weight"] == {"at_most": 0, "scale": 2.0}
