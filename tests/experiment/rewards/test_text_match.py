"""Rewards by comparison: exact texts, patterns and numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InputError, SpecError
from steelyard.experiment.rewards.text import ExactMatch, NumberMatch, RegexMatch, last_number


@pytest.mark.parametrize(
    ("options", "expected", "answer", "reward"),
    [
        ({}, "Paris", "Paris", 1.0),
        ({}, "Paris", " Paris\n", 1.0),
        ({}, " Paris ", "Paris", 1.0),
        ({"strip": False}, "Paris", "Paris\n", 0.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "Straße", "STRASSE", 1.0),
        ({}, "Paris", "Paris, France", 0.0),
        ({}, "", "", 1.0),
        ({}, "", "something", 0.0),
        ({}, 42, "42", 1.0),
        ({}, ["four", "4"], "4", 1.0),
        ({}, ["four", "4"], "five", 0.0),
        ({}, [], "", 0.0),
    ],
)
def test_exact_match(options: dict[str, Any], expected: Any, answer: str, reward: float) -> None:
    assert ExactMatch(**options)({"answer": expected}, answer) == reward


@pytest.mark.parametrize(
    ("options", "record", "answer", "reward"),
    [
        ({"pattern": "b+"}, {}, "abba", 1.0),
        ({"pattern": "b+", "full": True}, {}, "abba", 0.0),
        ({"pattern": "[ab]+", "full": True}, {}, "abba", 1.0),
        ({"pattern": "(?i)yes"}, {}, "YES", 1.0),
        ({"pattern": "^$"}, {}, "", 1.0),
        ({"field": "form"}, {"form": r"\d{2}"}, "12", 1.0),
        ({"field": "form"}, {"form": r"\d{2}"}, "1", 0.0),
    ],
)
def test_regex_match(
    options: dict[str, Any], record: dict[str, Any], answer: str, reward: float
) -> None:
    assert RegexMatch(**options)(record, answer) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("The answer is 42.", 42),
        ("4 of 5", 5),
        ("-3.5", -3.5),
        ("−3.5 °C", -3.5),
        ("+7", 7),
        ("x = -3", -3),
        ("5-3", 3),
        ("5 - 3", 3),
        ("(-3)", -3),
        ("1,234", 1234),
        ("$1,234,567.89!", 1234567.89),
        ("1,2", 2),
        ("1e3", 1000),
        ("2.5E-3 m", 0.0025),
        ("3 eggs", 3),
        (".5", 0.5),
        ("-.5", -0.5),
        ("50%", 50),
        ("10km", 10),
        ("#### 72", 72),
        ("version 1.2.3", 1.2),
        ("H2O", None),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["{}", "about {} km", "3 + 4 is {}.", "{:,}", "({:.3e})", "-1;{:.6f}"]),
)
def test_numbers_that_python_writes_are_found(number: float, form: str) -> None:
    spec = form[form.index("{") : form.index("}") + 1]
    written = float(spec.format(number).replace(",", ""))
    assert last_number(form.format(number)) == written


@pytest.mark.parametrize(
    ("options", "expected", "answer", "reward"),
    [
        ({}, 72, "It is 72.", 1.0),
        ({}, "48 + 24 = 72\n#### 72", "72", 1.0),
        ({}, 72, "73", 0.0),
        ({}, 72, "no idea", 0.0),
        ({}, 0, "0.0000001", 1.0),
        ({}, 1e6, "1,000,000.5", 1.0),  # relative to the size
        ({"tolerance": 0}, 1e6, "1,000,000.5", 0.0),
        ({"tolerance": 0.01}, 3.14159, "about 3.14", 1.0),
        ({"tolerance": 0.1}, -10, "-10.9", 1.0),
        ({"tolerance": 0.1}, -10, "-11.1", 0.0),
        ({}, 1, "9" * 400, 0.0),
    ],
)
def test_number_match(options: dict[str, Any], expected: Any, answer: str, reward: float) -> None:
    assert NumberMatch(**options)({"answer": expected}, answer) == reward


@pytest.mark.parametrize(
    ("reward", "record", "message"),
    [
        (
            ExactMatch(),
            {"prompt": "p", "anwser": "a"},
            (
                "each line of the prompts must have the field 'answer', which reward 'exact_match' "
                "compares with, got the fields ['prompt', 'anwser']."
            ),
        ),
        (
            ExactMatch(field="target"),
            {"target": None},
            (
                "the field 'target' of a prompt must hold a text or a number, or a list of them, "
                "got None (reward 'exact_match')."
            ),
        ),
        (
            RegexMatch(field="form"),
            {"form": "("},
            (
                "the field 'form' of a prompt must hold a regular expression, got '(' (reward "
                "'regex_match')."
            ),
        ),
        (
            RegexMatch(field="form"),
            {"form": 3},
            (
                "the field 'form' of a prompt must hold a regular expression, got 3 (reward "
                "'regex_match')."
            ),
        ),
        *[
            (
                NumberMatch(),
                {"answer": value},
                (
                    f"the field 'answer' of a prompt must hold a number, or a text with one, got "
                    f"{value!r} (reward 'number_match')."
                ),
            )
            for value in ("many", None, True, math.nan, [1])
        ],
    ],
)
def test_a_bad_field(reward: Any, record: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        reward(record, "4")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (ExactMatch, {"field": ""}, "field must be a non-empty string, got ''"),
        (ExactMatch, {"strip": 1}, "strip must be True or False, got 1"),
        (ExactMatch, {"ignore_case": "no"}, "ignore_case must be True or False, got 'no'"),
        (NumberMatch, {"field": 3}, "field must be a non-empty string, got 3"),
        (NumberMatch, {"tolerance": -1}, "tolerance must be a finite number >= 0, got -1"),
        (RegexMatch, {"field": 1}, "field must be a non-empty string, got 1"),
        (RegexMatch, {"pattern": "a", "full": 1}, "full must be True or False, got 1"),
        (
            RegexMatch,
            {"pattern": "("},
            (
                "pattern must be a regular expression (missing ), unterminated subpattern at "
                "position 0), got '('"
            ),
        ),
        (
            RegexMatch,
            {},
            "either pattern or field must be given, got pattern=None and field=None",
        ),
        (
            RegexMatch,
            {"pattern": "a", "field": "b"},
            "either pattern or field must be given, got pattern='a' and field='b'",
        ),
    ],
)
def test_an_invalid_option(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        cls(**options)
    assert str(caught.value) == f"{message} (reward {cls.name!r})."
