"""Rewards by logic, in this process and in another one."""

from __future__ import annotations

from typing import Any

import pytest
import z3

from steelyard.errors import InputError, SpecError
from steelyard.experiment.rewards.judges import LogicCheck
from steelyard.experiment.rewards.reward import Reward, Score
from steelyard.experiment.rewards.scoring import score


def factors(record: Any, answer: str) -> list[Any]:
    """The factors that the answer names make up the number of the record."""
    first, second = z3.Ints("first second")
    given = [int(word) for word in answer.split()]
    return [first == given[0], second == given[1], first * second == record["product"]]


def cubes(record: Any, answer: str) -> list[Any]:
    """Fermat's last theorem for cubes, which Z3 cannot decide."""
    a, b, c = z3.Ints("a b c")
    return [a > 0, b > 0, c > 0, a**3 + b**3 == c**3]


@pytest.mark.parametrize(("first", "second"), [(2, 6), (3, 4), (3, 5), (-3, -4), (0, 12)])
def test_the_verdict_is_that_of_arithmetic(first: int, second: int) -> None:
    reward = LogicCheck(constraints=factors)({"product": 12}, f"{first} {second}")
    assert reward == float(first * second == 12)


def test_each_verdict_has_its_reward() -> None:
    rewards = {"sat": 0.9, "unsat": -1.0, "unknown": 0.3}
    check = LogicCheck(constraints=factors, solver_timeout=300, **rewards)
    assert check({"product": 6}, "2 3") == 0.9
    assert check({"product": 6}, "2 4") == -1.0
    assert LogicCheck(constraints=cubes, solver_timeout=0.05, **rewards)({}, "") == 0.3


def test_an_answer_without_a_meaning_is_dropped_alone() -> None:
    reward = Reward("logic", LogicCheck(constraints=factors, solver_timeout=300))
    assert reward.executor == "process"
    answers = [({"product": 6}, "2 3"), ({"product": 6}, "two three"), ({"product": 6}, "1 1")]
    first, second, third = score([reward], answers, timeout=300.0)["logic"]
    assert (first, third) == (Score(1.0), Score(0.0))
    assert second.error == ("ValueError: invalid literal for int() with base 10: 'two'")


def test_a_function_is_imported_by_its_path() -> None:
    assert LogicCheck(constraints="operator:eq").constraints(1, 1) is True  # type: ignore[arg-type]  # as in a file


def test_something_else_than_constraints_is_an_error() -> None:
    with pytest.raises(InputError, match="the constraints of an answer must be Z3 expressions"):
        LogicCheck(constraints=lambda record, answer: answer)({}, "x > 1")


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("constraints", 3, "a function, or 'package.module:attr' that names one"),
        ("solver_timeout", 0, "a finite number > 0"),
        ("unknown", "no", "a finite number"),
    ],
)
def test_an_invalid_option(option: str, value: Any, rule: str) -> None:
    with pytest.raises(SpecError) as caught:
        LogicCheck(**{"constraints": factors, option: value})
    assert str(caught.value) == f"{option} must be {rule}, got {value!r} (reward 'logic')."
