"""Findings as text and as plain data."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from steelyard.doctor.finding import Finding
from steelyard.errors import StateError

FINDING = Finding(
    rule="bound broken",
    subject="regularizers/kl",
    severity="problem",
    what="regularizer 'kl' is beyond its bound of 0.3",
    evidence="3.4 at step 14, multiplier 1 → 2",
    cause="one update moves it by up to 5 × its bound",
    cure="divide the learning rate by 5",
    step=14,
)


def test_the_text_has_what_evidence_cause_and_cure() -> None:
    assert FINDING.text == (
        "Regularizer 'kl' is beyond its bound of 0.3; 3.4 at step 14, multiplier 1 → 2. "
        "One update moves it by up to 5 × its bound. Divide the learning rate by 5."
    )
    assert replace(FINDING, cause="").text.endswith("1 → 2. Divide the learning rate by 5.")


def test_the_text_of_one_that_has_ended_says_from_when_to_when() -> None:
    assert replace(FINDING, ended=20).text == (
        "Over at step 20, since step 14: regularizer 'kl' is beyond its bound of 0.3."
    )


def test_it_is_json_and_back() -> None:
    for finding in (FINDING, replace(FINDING, ended=20)):
        assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding


@pytest.mark.parametrize(
    "wrong",
    [
        {"severity": "fatal"},
        {"severity": ["problem"]},
        {"step": "14"},
        {"step": True},
        {"ended": 1.5},
        {"cause": None},
        {"more": 1},
    ],
)
def test_other_mappings_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="a finding must hold rule, subject, severity"):
        Finding.from_dict(FINDING.to_dict() | wrong)
    with pytest.raises(StateError, match="a finding must hold"):
        Finding.from_dict([])  # type: ignore[arg-type]  # a state from elsewhere
