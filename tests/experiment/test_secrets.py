"""Redaction of the API key."""

from __future__ import annotations

import pytest

from steelyard.experiment.secrets import redact


def test_the_api_key_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-0123")
    assert redact("key tml-0123.") == "key ***."
    assert redact("tml-0123 tml-012 tml-0123") == "*** tml-012 ***"


@pytest.mark.parametrize("key", ["", "a", "abc"])
def test_a_short_key_is_not_replaced(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    assert redact("a b abc") == "a b abc", "it would garble ordinary text"


def test_without_a_key_the_text_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert redact("key tml-0123.") == "key tml-0123."
