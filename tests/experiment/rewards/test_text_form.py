"""Rewards by form: length and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import SpecError
from steelyard.experiment.rewards.text import Length, ValidJSON


@pytest.mark.parametrize(
    ("options", "answer", "reward"),
    [
        ({"max_words": 2}, "", 1.0),
        ({"max_words": 2}, "  two\nwords ", 1.0),
        ({"max_words": 2}, "just three words", 0.5),
        ({"max_words": 2}, "a b c d", 0.0),
        ({"max_words": 2}, "a b c d e f", 0.0),
        ({"min_words": 4}, "just three words", 0.75),
        ({"min_words": 4}, "", 0.0),
        ({"min_words": 1}, "a " * 1000, 1.0),
        ({"max_characters": 4}, "abcd", 1.0),
        ({"max_characters": 4}, "abcde", 0.75),
        ({"min_characters": 4}, "abc", 0.75),
        ({"max_words": 1, "max_characters": 8}, "abc def gh", 0.0),
        ({"max_words": 3, "max_characters": 8}, "abc def gh", 0.75),
    ],
)
def test_length(options: dict[str, Any], answer: str, reward: float) -> None:
    assert Length(**options)({}, answer) == reward


@given(st.integers(0, 60), st.integers(0, 10), st.integers(1, 20))
def test_length_is_in_range_and_never_rises_away_from_the_limits(
    words: int, low: int, more: int
) -> None:
    length = Length(min_words=low, max_words=low + more)
    here, there = (length({}, "w " * count) for count in (words, words + 1))
    assert 0 <= here <= 1
    assert here <= there if words < low else here >= there


@pytest.mark.parametrize(
    ("options", "answer", "reward"),
    [
        ({}, '{"a": [1, 2.5, null, true]}', 1.0),
        ({}, " \n[]\t", 1.0),
        ({}, "3", 1.0),
        ({}, "9" * 5000, 1.0),
        ({}, "", 0.0),
        ({}, "NaN", 0.0),
        ({}, "[-Infinity]", 0.0),
        ({}, "{'a': 1}", 0.0),
        ({}, '{"a": 1,}', 0.0),
        ({}, '{"a": 1} {"b": 2}', 0.0),
        ({}, 'Here it is: {"a": 1}', 0.0),
        ({}, '```json\n{"a": 1}\n```', 0.0),
        ({}, "[" * 100_000, 0.0),
        ({"type": "object"}, "{}", 1.0),
        ({"type": "object"}, "[]", 0.0),
        ({"type": "array"}, "[]", 1.0),
        ({"type": "string"}, '"text"', 1.0),
        ({"type": "number"}, "3", 1.0),
        ({"type": "number"}, "true", 0.0),
        ({"type": "boolean"}, "false", 1.0),
        ({"type": "null"}, "null", 1.0),
        ({"required": ["a", "b"]}, '{"a": null, "b": 2, "c": 3}', 1.0),
        ({"required": ["a", "b"]}, '{"a": 1}', 0.0),
        ({"required": ["a"]}, '["a"]', 0.0),
        ({"required": ["a"], "type": "object"}, '{"a": 1}', 1.0),
    ],
)
def test_valid_json(options: dict[str, Any], answer: str, reward: float) -> None:
    assert ValidJSON(**options)({}, answer) == reward


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
@settings(max_examples=30)
def test_everything_that_json_writes_is_valid(value: Any) -> None:
    text = json.dumps(value)
    assert ValidJSON()({}, text) == 1.0
    assert ValidJSON()({}, f"{text} x") == 0.0


NONE = "at least one of max_words, min_words, max_characters and min_characters must be given, got "


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (Length, {}, f"{NONE}none"),
        (Length, {"min_words": 0}, f"{NONE}none"),
        (Length, {"max_words": 0}, "max_words must be a whole number >= 1, got 0"),
        (Length, {"max_words": 2.5}, "max_words must be a whole number >= 1, got 2.5"),
        (Length, {"min_words": -1}, "min_words must be a whole number >= 0, got -1"),
        (
            Length,
            {"min_characters": 5, "max_characters": 4},
            "max_characters must be a whole number >= 5, got 4",
        ),
        (
            ValidJSON,
            {"type": "dict"},
            (
                "type must be one of 'object', 'array', 'string', 'number', 'boolean', 'null', got "
                "'dict'"
            ),
        ),
        (ValidJSON, {"required": "city"}, "required must be a list of keys, got 'city'"),
        (ValidJSON, {"required": [1]}, "required must be a list of keys, got [1]"),
        (
            ValidJSON,
            {"required": ["a"], "type": "array"},
            "type must be 'object' where keys are required, got 'array'",
        ),
    ],
)
def test_an_invalid_option(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        cls(**options)
    assert str(caught.value) == f"{message} (reward {cls.name!r})."
