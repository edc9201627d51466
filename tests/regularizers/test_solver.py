"""Verdicts of Z3; `test_logic.py` has its limits and its use in threads."""

from __future__ import annotations

import contextlib
from typing import ClassVar

import pytest
import z3

from steelyard.errors import InputError
from steelyard.regularizers import logic
from steelyard.regularizers.logic import verdict


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


class Listed(list[object]):
    """Constraints that note whether the lock was held when they were freed."""

    freed: ClassVar[list[bool]] = []

    def __del__(self) -> None:
        self.freed.append(logic._lock.locked())


@pytest.mark.parametrize("constraint", [True, "x > 1"])
def test_what_z3_has_made_is_freed_while_no_other_thread_uses_it(constraint: object) -> None:
    Listed.freed.clear()
    with contextlib.suppress(InputError):
        verdict(lambda: Listed([constraint]), 300.0, "datum 0")
    assert Listed.freed == [True]


def test_what_a_failing_function_has_made_is_freed_before_its_error_is_handled() -> None:
    def fail() -> None:
        kept = Listed()
        raise KeyError(len(kept))

    Listed.freed.clear()
    with pytest.raises(KeyError):
        verdict(fail, 300.0, "datum 0")
    assert Listed.freed == [True]
