"""Facts: of specs, of configs, and of what claims to be one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from steelyard import regularizers
from steelyard.doctor.facts import Facts, RewardFacts, TermFacts
from steelyard.schedules import warmup
from steelyard.spec.regularizer import RegularizerSpec


def own(data: object, logprobs: object) -> float:
    return 0.0


def spec(fn: Any, weight: Any = 0.1, **more: Any) -> TermFacts:
    return TermFacts.of(RegularizerSpec(fn, weight, **more))


def test_facts_of_a_ready_made_divergence() -> None:
    kl = TermFacts.of(RegularizerSpec(regularizers.KLToReference(), at_most=0.3, every=2))
    assert kl == TermFacts(
        "kl_to_reference",
        kind="kl_to_reference",
        bound="at_most",
        reference="reference_logprobs",
        restraint=True,
        reduction="mean",
        every=2,
    )
    assert kl.compares_models
    assert TermFacts.of(RegularizerSpec(own, name="x", at_least=0.0, scale=2.0)) == TermFacts(
        "x", bound="at_least", scale=2.0
    )


def test_facts_of_other_terms() -> None:
    assert spec(own, name="own") == TermFacts("own", weight=0.1)
    assert spec(own, warmup(0.1, 5), name="own").weight is None
    assert spec(own, name="own", anchor=True).restraint
    assert spec(own, name="own", run_in="process", gradient="none").gradient == "none"
    parity = spec(regularizers.DemographicParity(test="none"))
    assert (parity.kind, parity.smallest_batch) == ("demographic_parity", 16)
    assert not parity.compares_models
    assert spec(regularizers.L1(reduction="sum")).reduction == "sum"
    assert not spec(own, name="own", enabled=False).enabled


def test_facts_of_a_wrapper_are_those_of_what_it_wraps() -> None:
    adaptive = spec(regularizers.Adaptive(regularizer="kl_to_reference", target=0.1))
    assert (adaptive.name, adaptive.kind) == ("adaptive_kl_to_reference", "kl_to_reference")
    assert adaptive.restraint
    assert spec(regularizers.Adaptive(regularizer=own, target=0.1)).kind == ""


def test_a_term_over_the_vocabulary_is_a_restraint_if_it_has_a_reference() -> None:
    kl = spec(regularizers.WholeVocabulary(kind="kl"))
    assert (kl.restraint, kl.space) == (True, "logits")
    assert not spec(regularizers.WholeVocabulary(kind="entropy")).restraint


def test_a_class_elsewhere_that_has_the_name_of_a_ready_made_one_is_not_it() -> None:
    class L1:
        name = "l1"

        def compute(self, data: object, logprobs: object) -> float:
            return 0.0

    assert spec(L1()).kind == ""


CONFIG: dict[str, Any] = {
    "loss": {"use": "ppo", "reduction": "sum"},
    "train": {
        "learning_rate": 1e-4,
        "grad_clip_norm": 1.0,
        "gradient_accumulation_steps": 2,
        "grad_space": "parameters",
    },
    "rollouts": {"per_step": 4, "group_size": 8, "advantage": "grpo", "substeps": 2},
    "rewards": [
        {"use": "exact_match", "name": ""},
        {"use": "my:short", "name": "brief", "run_in": "process"},
    ],
    "regularizers": [
        {"use": "kl", "name": "", "weight": {"at_most": 0.3}},
        {"use": "entropy", "name": "h", "weight": {"at_least": 0, "scale": 2.0}, "every": 4},
        {"use": "my:own", "weight": 0.5, "enabled": False, "needs": ["logits"], "anchor": True},
        {"use": "adaptive", "name": "a", "weight": 1.0, "options": {"regularizer": "kl"}},
        {
            "use": "truncated_importance_sampling",
            "name": "t",
            "weight": {"warmup": [0.1, 5]},
            "options": {"regularizer": {"fn": "l2", "options": {"reduction": "sum"}}},
        },
        {"use": "whole_vocabulary", "weight": 1.0, "options": {"kind": "kl"}},
    ],
}


def test_facts_of_a_config() -> None:
    facts = Facts.of_config(CONFIG)
    assert facts == Facts(
        terms=(
            TermFacts(
                "kl",
                "kl_to_reference",
                reference="reference_logprobs",
                bound="at_most",
                restraint=True,
                reduction="mean",
            ),
            TermFacts("h", "entropy", bound="at_least", scale=2.0, reduction="mean", every=4),
            TermFacts("my:own", weight=0.5, restraint=True, space="logits", enabled=False),
            TermFacts(
                "a",
                "kl_to_reference",
                1.0,
                reference="reference_logprobs",
                restraint=True,
                reduction="mean",
            ),
            TermFacts("t", "l2", reduction="sum"),
            TermFacts("whole_kl", "whole_vocabulary", 1.0, restraint=True, reduction="mean"),
        ),
        rewards=(RewardFacts("exact_match", 1.0), RewardFacts("brief", run_in="process")),
        loss="ppo",
        reduction="sum",
        advantage="grpo",
        batch_size=16,
        answers=32,
        substeps=2,
        learning_rate=1e-4,
        grad_clip_norm=1.0,
        grad_space="parameters",
    )
    assert Facts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("kl", {}),
        ("kl_to_reference", {}),
        ("l1", {"reduction": "sum"}),
        ("entropy", {}),
        ("demographic_parity", {"test": "none"}),
        ("whole_vocabulary", {"kind": "kl"}),
        ("whole_vocabulary", {"kind": "entropy"}),
        ("adaptive", {"regularizer": "kl", "target": 0.1}),
        (
            "adaptive",
            {"regularizer": {"fn": "whole_vocabulary", "options": {"kind": "js"}}, "target": 0.1},
        ),
        ("truncated_importance_sampling", {"regularizer": "kl", "high": 2.0}),
        ("masked_importance_sampling", {"regularizer": "entropy", "high": 2.0}),
    ],
)
def test_a_config_and_the_spec_that_it_makes_have_the_same_facts(
    use: str, options: dict[str, Any]
) -> None:
    spec = RegularizerSpec.from_dict({"fn": use, "weight": 0.5, "options": options})
    of_config = TermFacts.of_config({"use": use, "weight": 0.5, "options": options})
    # What a regularizer prefers by itself is not in a config.
    assert of_config == replace(TermFacts.of(spec), space="", gradient="auto", run_in="auto")


def test_facts_of_a_supervised_config() -> None:
    facts = Facts.of_config({"train": {"batch_size": 8}, "loss": {"use": "mine:own"}})
    assert (facts.batch_size, facts.answers, facts.reduction) == (8, None, "")


def test_terms_and_rewards_that_are_not_declared_have_the_defaults() -> None:
    facts = Facts(rewards=(RewardFacts("short", 2.0),)).with_specs(
        [RegularizerSpec(own, 0.5, "own")]
    )
    assert (facts.term("own").weight, facts.term("x")) == (0.5, TermFacts("x"))
    assert (facts.reward("short").highest, facts.reward("x")) == (2.0, RewardFacts("x"))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["use", "weight", "options", "regularizer", "needs", "scale", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
TABLES = ("loss", "train", "rollouts", "rewards", "regularizers", "terms", "reduction", "substeps")


@given(st.dictionaries(st.sampled_from(TABLES), ANYTHING) | ANYTHING)
def test_a_config_and_facts_may_hold_anything(content: Any) -> None:
    for facts in (Facts.of_config(content), Facts.from_dict(content)):
        json.dumps(facts.to_dict())
        assert Facts.from_dict(facts.to_dict()) == facts


@pytest.mark.parametrize("entry", [{"use": 3}, {"use": ["kl"]}, {"options": 1, "weight": True}])
def test_an_entry_of_other_types_has_the_defaults(entry: dict[str, Any]) -> None:
    (term,) = Facts.of_config({"regularizers": [entry]}).terms
    assert term == TermFacts("")


def test_data_of_a_terms_own_count_for_its_batch() -> None:
    entry = {"use": "demographic_parity", "data": "other.jsonl", "per_step": 32}
    assert TermFacts.of_config(entry).batch_size == 32
    assert TermFacts.of_config({**entry, "per_step": None}).batch_size == 4
    assert TermFacts.of_config({"use": "kl"}).batch_size is None
    spec = RegularizerSpec(lambda data, logprobs: 0.0, 0.1, "own", data=[1, 2], per_step=2)
    assert TermFacts.of(spec).batch_size == 2


def test_the_reference_of_a_divergence_is_a_field() -> None:
    assert TermFacts.of_config({"use": "kl", "options": {"reference": "logprobs"}}).reference == (
        "logprobs"
    )
    spec = RegularizerSpec(
        regularizers.KLToReference(reference=lambda datum, index: datum), 0.1, "kl"
    )
    assert TermFacts.of(spec).reference == ""


def test_what_0_means_is_asked_of_the_users_own_terms() -> None:
    class Own:
        zero_means = "it compares a file with itself"

        def compute(self, data: object, logprobs: object) -> float:
            return 0.0

    assert TermFacts.of(RegularizerSpec(Own(), 0.1, "own")).zero_means.startswith("it compares")
