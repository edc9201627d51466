"""Redaction of secrets in texts and configs."""

from __future__ import annotations

import base64
import html
import json
from typing import Any
from urllib.parse import quote

import pytest

from steelyard.output.redaction import (
    REDACTED,
    holds_redacted,
    is_secret_name,
    redact,
    remember,
)


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


def test_numbers_and_keys_stay_so_that_json_stays_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "12345678")
    line = {"loss": 0.123456789, "loss 12345678": 1, "reason": "12345678 is wrong"}
    assert redact(line) == {**line, "reason": "*** is wrong"}


@pytest.mark.parametrize(
    "name",
    [
        "Authorization",
        "proxy-authorization",
        "Cookie",
        "Set-Cookie",
        "X-Api-Key",
        "apiKey",
        "password",
        "db_password",
        "client_secret",
        "accessToken",
        "token",
        "private_key",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert redact({"a": [{name: "value"}]}) == {"a": [{name: REDACTED}]}
    assert redact({"options": {name: {"b": ["value", None, True, "", 7]}}}) == {
        "options": {name: {"b": [REDACTED, None, True, "", REDACTED]}}
    }
    assert redact({f"custom/{name}": 7}) == {f"custom/{name}": 7}, "a metric"


@pytest.mark.parametrize("name", ["X-Vault-Token", "Ocp-Apim-Subscription-Key", "X-My-Secret"])
def test_names_of_secret_headers(name: str) -> None:
    assert redact({"headers": {name: "v", "Accept": "v"}}) == {
        "headers": {name: REDACTED, "Accept": "v"}
    }
    assert redact({"extra_headers": [[name, "v"], ["Accept", "v"]]}) == {
        "extra_headers": [[name, REDACTED], ["Accept", "v"]]
    }


@pytest.mark.parametrize(
    "name", ["sort_key", "pad_token", "max_tokens", "target_tokens", "keyword", "author", "name"]
)
def test_names_of_other_options(name: str) -> None:
    assert redact({"options": {name: "value"}}) == {"options": {name: "value"}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:pw@host:80/a?b=c#d", "https://***@host:80/a?b=c#d"),
        ("https://token@host/", "https://***@host/"),
        ("https://me:p@w@host/a@b", "https://***@host/a@b"),
        ("""https://me:p"w'<>@host/""", "https://***@host/"),
        ("at 'postgres://me:pw@host/db', twice", "at 'postgres://***@host/db', twice"),
        ("https://host/?a=b&api_key=k1&sig=k2", "https://host/?a=b&api_key=***&sig=***"),
        ("https://host/?X-Amz-Signature=k1;a=b", "https://host/?X-Amz-Signature=***;a=b"),
        ("https://host/a?b=c@d", "https://host/a?b=c@d"),
        ("""["http://a","b@c"] me@host ://@""", """["http://a","b@c"] me@host ://@"""),
    ],
)
def test_passwords_in_urls(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(redact(text)) == expected
    assert holds_redacted(redact(text)) == (text != expected)


def test_a_reference_is_not_a_secret() -> None:
    options = {"headers": {"Authorization": {"env": "NAME"}, "Cookie": {"file": "cookie.txt"}}}
    assert redact(options) == options


def test_what_is_remembered_is_replaced_in_every_spelling() -> None:
    secret = 'kéy"s &/4711'
    remember(secret)
    spellings = [secret, json.dumps(secret), repr(secret), quote(secret), html.escape(secret)]
    spellings.append(base64.b64encode(secret.encode()).decode())
    for text in spellings:
        assert "4711" not in redact(f"refused: {text}.")
        assert redact(f"refused: {text}.").startswith("refused: ")
    assert base64.b64encode(secret.encode()).decode() not in redact(" ".join(spellings))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"headers": {"Authorization": "Bearer bearer-5161"}}, "bearer-5161"),
        ({"headers": {"Authorization": "Basic bWU6YmFzaWMtNTE2Mg=="}}, "basic-5162"),
        ({"headers": {"Cookie": "a=cookie-5163; b=cookie-5164"}}, "cookie-5164"),
        ({"url": "https://me:url%2D5165@host/"}, "url-5165"),
        ({"url": "https://user-5166@host/"}, "user-5166"),
        ({"url": "https://me:pw@host/?key=query%2D5167"}, "query-5167"),
        ({"url": "https://me:word5168@host/"}, base64.b64encode(b"me:word5168").decode()),
        ({"password": 51695169}, "51695169"),
        ({"deep": [{"token": ["deep-5170"]}]}, "deep-5170"),
    ],
)
def test_the_secrets_of_a_config_are_remembered(config: dict[str, Any], found: str) -> None:
    assert redact(f"before {found}") == f"before {found}"
    remember({"regularizers": [{"options": config}]})
    assert redact(f"got {found}.") == "got ***."


def test_a_short_secret_is_replaced_as_a_word_only() -> None:
    remember({"password": "xylo"})
    assert redact("xylo xylophone (xylo)") == "*** xylophone (***)"
