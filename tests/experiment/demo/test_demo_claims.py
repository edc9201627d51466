"""Arithmetic claims as constraints for Z3."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import z3

from steelyard.experiment.demo.demo import holds
from steelyard.regularizers import LogicalConsistency

from .files import DATA, HELD_OUT


@pytest.mark.parametrize(
    ("claim", "true"),
    [
        ("17 + 25 = 42", True),
        ("17 + 25 = 43", False),
        ("9 - 4 = 5", True),
        ("4 - 9 = 5", False),
        ("6 * 7 = 42", True),
        ("6 * 9 = 42", False),
    ],
)
def test_the_constraint_is_the_truth_of_the_claim(claim: str, true: bool) -> None:
    (constraint,) = holds(SimpleNamespace(record={"claim": claim}), 0)
    assert z3.is_true(z3.simplify(constraint)) is true


def test_a_claim_is_false_exactly_in_bad_answers() -> None:
    claims = [line for line in DATA + HELD_OUT if "claim" in line]
    assert len(claims) >= 50
    judge = LogicalConsistency(constraints=holds)
    data = [SimpleNamespace(record=line) for line in claims]
    penalties, metrics = judge.compute(data, [])
    assert penalties == [float(line["bad"]) for line in claims]
    assert metrics["unknown"] == 0


def test_a_claim_that_is_not_arithmetic_is_an_error() -> None:
    with pytest.raises(ValueError, match="claim must be a sum such as '17 \\+ 25 = 42', got 'x'"):
        holds(SimpleNamespace(record={"claim": "x"}), 0)
