"""What must stay out of every file and every line of output: the key of the Tinker service."""

from __future__ import annotations

import os

_KEYS = ("TINKER_API_KEY",)
_SHORTEST = 4  # a shorter one would blank out words that are no secret


def redact(text: str) -> str:
    """`text` with `***` for each secret of the environment."""
    for name in _KEYS:
        secret = os.environ.get(name, "")
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, "***")
    return text
