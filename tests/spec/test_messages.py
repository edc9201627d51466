from __future__ import annotations

from typing import Any

import pytest

from steelyard.spec import describe


class UnreadableError(Exception):
    def __init__(self, text: Any) -> None:
        self.text = text

    def __str__(self) -> str:
        if isinstance(self.text, Exception):
            raise self.text
        return self.text  # type: ignore[no-any-return]  # or something else


def test_an_exception_is_its_type_and_message() -> None:
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(SystemExit(2)) == "SystemExit: 2"


@pytest.mark.parametrize("text", [RuntimeError("no"), None, 3])
def test_an_exception_whose_message_cannot_be_read(text: Any) -> None:
    assert describe(UnreadableError(text)) == "UnreadableError (its message cannot be read)"
