"""Redact secrets of the environment, such as the Tinker API key, in files and output."""

from __future__ import annotations

import os

_KEYS = ("TINKER_API_KEY",)
_MIN_LENGTH = 4  # replacing a shorter value would garble ordinary text


def redact(text: str) -> str:
    """Replace each secret of the environment in `text` by `***`."""
    for name in _KEYS:
        secret = os.environ.get(name, "")
        if len(secret) >= _MIN_LENGTH:
            text = text.replace(secret, "***")
    return text
