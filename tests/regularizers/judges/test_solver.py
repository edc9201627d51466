"""Verdicts of Z3; `test_logic.py` has its limits and its use in threads."""

from __future__ import annotations

import pytest
import z3

from steelyard.errors import InputError
from steelyard.regularizers.judges import verdict


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1, 3, "sat"), (1, 2, "unsat"), (3, 1, "unsat")]
)
def test_a_whole_number_between_two_others(low: int, high: int, expected: str) -> None:
    x = z3.Int("x")
    assert verdict(lambda: [x > low, x < high], 300.0, "an answer") == expected


def test_the_message_says_what_the_constraints_belong_to() -> None:
    with pytest.raises(InputError) as caught:
        verdict(lambda: ["x > 1"], 1.0, "datum 3")
    assert str(caught.value) == (
        "the constraints of datum 3 must be Z3 expressions that are true or false, one or a list "
        "of them, got 'x > 1'."
    )
