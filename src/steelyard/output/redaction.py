"""Redact secrets in everything that is written, printed or sent to a logger.

`redact` replaces by `***`

- values under keys that are named like secrets: `Authorization`, `X-Api-Key`, `password`;
- the user and the password of a URL, and the values of its query that are named like secrets;
- wherever they occur in a text, the values that `remember` was given, and the API keys in the
  environment. Every `Config` remembers its secrets when it is validated.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import quote, quote_plus, unquote

REDACTED = "***"

T = TypeVar("T")
KeyPath: TypeAlias = tuple[str | int, ...]  # keys and list indices from the root to a leaf

_ENVIRONMENT = ("TINKER_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_MIN_LENGTH = 4  # replacing a shorter value would garble ordinary text
_MIN_INSIDE = 8  # a shorter value is replaced as a whole word only

_ALWAYS = re.compile(
    r"(.*_)?(authorization|cookies?|passw(or)?d|passphrase|pwd|secrets?|credentials?|bearer"
    r"|(api|access|auth|private|secret|subscription)_?key"
    r"|(access|api|auth|bearer|id|refresh|session)_?token)|auth|token"
)
# In a config `sort_key` and `pad_token` are ordinary options; as headers such names are secrets.
_HEADER = re.compile(r"(.*_)?(auth|jwt|key|secret|session|signature|token)s?")
_QUERY = re.compile(
    r"([?&;](?:[\w.%-]*[_.-])?(?:apikey|auth|authorization|credential|key|passwd|password|pwd|sig"
    r"|signature|secret|token)=)[^\s&;#]+",
    re.IGNORECASE,
)
# A text that is nothing but a URL may have quotes in it; within a sentence they end the URL.
_URL = re.compile(r"\A[A-Za-z][\w+.-]*://\S+\Z|[A-Za-z][\w+.-]*://[^\s\"'<>]+")
_USERINFO = re.compile(r"(?<=://)[^/?#]*(?=@)")
_SCHEME = re.compile(r"(apikey|basic|bearer|token)\s+(\S+)", re.IGNORECASE)

_lock = threading.Lock()
_remembered: frozenset[str] = frozenset()


def redact(value: T) -> T:
    """Copy a text, or nested mappings and lists, with every secret replaced by `***`.

    Keys and numbers stay as they are, so that JSON stays JSON, as do references to secrets,
    `{"env": "NAME"}`. In `options` and `resources`, a number under a key that is named like
    a secret is one too, and a text that holds a secret is replaced as a whole, so that
    `holds_redacted` finds it.

    Example:
        >>> redact({"url": "https://me:pw@host/?key=k1", "headers": {"X-Api-Key": "k2"}})
        {'url': 'https://***@host/?key=***', 'headers': {'X-Api-Key': '***'}}
    """

    def change(path: KeyPath, leaf: Any, secret: bool) -> Any:
        if secret and _is_literal(path, leaf):
            return REDACTED
        if not isinstance(leaf, str):
            return leaf
        text = _URL.sub(_redact_url, leaf)
        known = _known_secrets().sub(REDACTED, text)
        return REDACTED if known != text and _is_option(path) else known

    return cast("T", map_leaves(value, change))


def remember(value: Any) -> None:
    """Have `redact` replace the secrets in a config, or one secret, in any text from now on."""
    global _remembered  # noqa: PLW0603 - one set for the process, replaced under the lock
    secrets: set[str] = set()
    for path, leaf, is_secret in leaves(value):
        if is_reference(leaf):
            secrets.add(os.environ.get(leaf.get("env", ""), ""))
        elif (is_secret or not path) and _is_literal(path, leaf):
            secrets.update(_parts(path, str(leaf)))
        elif isinstance(leaf, str):
            secrets.update(_url_secrets(leaf))
    with _lock:
        _remembered |= secrets - {"", REDACTED}


def is_reference(value: Any) -> bool:
    """Return whether a value of a config is `{ env = "NAME" }` or `{ file = "PATH" }`."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return False
    ((key, where),) = value.items()
    return key in ("env", "file") and isinstance(where, str)


def holds_redacted(value: Any) -> bool:
    """Return whether a value of a config is what `redact` leaves of a secret."""
    if not isinstance(value, str):
        return False
    urls = _URL.findall(value)
    return value == REDACTED or any(f"//{REDACTED}@" in u or f"={REDACTED}" in u for u in urls)


def leaves(value: Any) -> list[tuple[KeyPath, Any, bool]]:
    """Path of each leaf of nested mappings and lists, the leaf, and whether it is a secret.

    See `map_leaves`.
    """
    entries: list[tuple[KeyPath, Any, bool]] = []
    map_leaves(value, lambda *entry: entries.append(entry))
    return entries


def map_leaves(
    value: Any,
    change: Callable[[KeyPath, Any, bool], Any],
    path: KeyPath = (),
    *,
    headers: bool = False,
    secret: bool = False,
) -> Any:
    """Copy nested mappings and lists with `change(path, leaf, secret)` in place of each leaf.

    A reference to a secret is a leaf. `secret` is true below a key that is named like a secret.
    """
    if isinstance(value, Mapping) and not is_reference(value):
        return {
            key: map_leaves(
                inner,
                change,
                (*path, key),
                headers=_words(key).endswith(("header", "headers")),
                secret=secret or is_secret_name(key, header=headers),
            )
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        # Headers may also be pairs of a name and a value.
        named = headers and len(value) == 2 and is_secret_name(value[0], header=True)  # noqa: PLR2004
        return [
            map_leaves(
                inner,
                change,
                (*path, index),
                headers=headers,
                secret=secret or (named and index == 1),
            )
            for index, inner in enumerate(value)
        ]
    return change(path, value, secret)


def is_secret_name(name: Any, *, header: bool = False) -> bool:
    """Return whether a key, or with `header` the name of an HTTP header, is named like a secret.

    Example:
        >>> is_secret_name("apiKey"), is_secret_name("pad_token")
        (True, False)
        >>> is_secret_name("X-Vault-Token", header=True), is_secret_name("Accept", header=True)
        (True, False)
    """
    words = _words(name)
    return bool(_ALWAYS.fullmatch(words) or (header and _HEADER.fullmatch(words)))


def _words(name: Any) -> str:
    return _snake_case(str(name))


@lru_cache(maxsize=4096)  # the records of a run have the same few keys
def _snake_case(name: str) -> str:
    """`snake_case` of a key in any spelling."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^A-Za-z0-9]+", "_", spaced).lower()


def _is_literal(path: KeyPath, leaf: Any) -> bool:
    # Not every number: a metric may be named like a secret.
    is_number = isinstance(leaf, int) and not isinstance(leaf, bool)
    return (is_number and _is_option(path)) or (isinstance(leaf, str) and bool(leaf))


def _is_option(path: KeyPath) -> bool:
    return "options" in path or "resources" in path


def _known_secrets() -> re.Pattern[str]:
    return _pattern(_remembered, tuple(os.environ.get(name, "") for name in _ENVIRONMENT))


def _redact_url(match: re.Match[str]) -> str:
    url = _USERINFO.sub(REDACTED, match[0], count=1)
    return _QUERY.sub(rf"\1{REDACTED}", url)


@lru_cache(maxsize=4)
def _pattern(remembered: frozenset[str], environment: Iterable[str]) -> re.Pattern[str]:
    forms = {form for secret in (*remembered, *environment) for form in _forms(secret)}
    # The longest first: where one secret begins with another, no end of it is left over.
    ordered = sorted((f for f in forms if len(f) >= _MIN_LENGTH), key=len, reverse=True)
    alternatives = [
        re.escape(f) if len(f) >= _MIN_INSIDE else rf"(?<!\w){re.escape(f)}(?!\w)" for f in ordered
    ]
    return re.compile("|".join(alternatives) or r"(?!)")


def _forms(secret: str) -> set[str]:
    """Spellings of a secret in JSON, in a repr, in a URL, in HTML and in a Basic header."""
    return {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
        quote(secret, errors="replace"),
        quote(secret, safe="", errors="replace"),
        quote_plus(secret, errors="replace"),
        html.escape(secret),
        base64.b64encode(secret.encode(errors="replace")).decode(),
    }


def _parts(path: KeyPath, secret: str) -> Iterator[str]:
    """Yield a secret, and those in it: the token after `Bearer`, the values of cookies."""
    yield secret
    yield from _url_secrets(secret)
    with_scheme = _SCHEME.fullmatch(secret)
    if with_scheme:
        yield with_scheme[2]
        yield _basic_password(with_scheme[2])
    if path and "cookie" in _words(path[-1]):
        for cookie in secret.split(";"):
            yield cookie.partition("=")[2].strip()


def _basic_password(credentials: str) -> str:
    try:
        decoded = base64.b64decode(credentials, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return decoded.partition(":")[2]


def _url_secrets(text: str) -> Iterator[str]:
    for url in _URL.findall(text):
        for userinfo in _USERINFO.findall(url)[:1]:
            user, colon, password = (unquote(part) for part in userinfo.partition(":"))
            yield password if colon else user
            yield f"{user}:{password}"  # its base64 form is a Basic header
        for pair in _QUERY.finditer(url):
            yield unquote(pair[0].removeprefix(pair[1]))
