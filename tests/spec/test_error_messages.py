from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.spec.error_messages import (
    BASE,
    describe,
    describe_with_place,
    did_you_mean,
    keep_place,
    quote_own_code,
    raised_at,
    title,
)


class UnreadableError(Exception):
    def __init__(self, text: Any) -> None:
        self.text = text

    def __str__(self) -> str:
        if isinstance(self.text, Exception):
            raise self.text
        return self.text  # type: ignore[no-any-return]  # or something else


def test_messages_call_a_term_by_its_title() -> None:
    assert (title(BASE), title("l2")) == ("the base loss", "regularizer 'l2'")
    assert title(BASE, "reward") == "reward 'base'"


def test_an_exception_is_its_type_and_message() -> None:
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(SystemExit(2)) == "SystemExit: 2"


@pytest.mark.parametrize("text", [RuntimeError("no"), None, 3])
def test_an_exception_whose_message_cannot_be_read(text: Any) -> None:
    assert describe(UnreadableError(text)) == "UnreadableError (its message cannot be read)"


def test_the_place_of_an_exception_is_the_innermost_line_of_the_users_own() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")  # raised by Python's own json
    line = caught.traceback[0].lineno + 1
    assert raised_at(caught.value) == f"{__file__}, line {line}"
    assert describe_with_place(caught.value).endswith(f"({__file__}, line {line})")


def test_a_syntax_error_is_placed_in_the_file_that_has_it() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\ndef f(:\n", "own.py", "exec")
    assert describe_with_place(caught.value) == "SyntaxError: invalid syntax (own.py, line 2)"


def test_an_exception_that_was_not_raised_has_no_place() -> None:
    assert not raised_at(KeyError("x"))
    assert describe_with_place(KeyError("x")) == "KeyError: 'x'"


def nested(depth: int) -> float:
    return nested(depth - 1) if depth else 1 / depth


def test_the_users_own_lines_are_quoted_below_an_error_once() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        nested(20)
    error = RuntimeError("term 'x' failed")
    assert not quote_own_code(error)
    error.__cause__ = caught.value
    assert [quote_own_code(error), quote_own_code(error)] == [True, True]
    (note,) = error.__notes__
    line = nested.__code__.co_firstlineno + 1
    assert note.startswith(f'  File "{__file__}", line ')
    assert note.count(f'  File "{__file__}", line {line}, in nested\n    return nested(') == 3
    assert note.endswith("[Previous line repeated 18 more times]")


def test_the_code_of_a_syntax_error_is_quoted() -> None:
    error = RuntimeError("no")
    error.__cause__ = SyntaxError("invalid syntax", ("own.py", 2, 5, "def f(:\n"))
    assert quote_own_code(error)
    assert error.__notes__ == ['  File "own.py", line 2, in <module>\n    def f(:']


def test_code_that_is_not_the_users_is_not_quoted() -> None:
    error = RuntimeError("no")
    error.__cause__ = KeyError("never raised")
    assert not quote_own_code(error)
    assert not hasattr(error, "__notes__")


def test_the_nearest_known_name_is_hinted_at_if_there_is_one() -> None:
    assert did_you_mean("ppoo", ("ppo", "cispo")) == "; did you mean 'ppo'?"
    assert did_you_mean("qqqq", ("ppo", "cispo")) == ""


def test_the_place_of_an_exception_is_kept_when_it_is_pickled() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("no")
    place = raised_at(caught.value)
    keep_place(caught.value)
    assert Path(__file__).name in place
    assert raised_at(caught.value.with_traceback(None)) == place
