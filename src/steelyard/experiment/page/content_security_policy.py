"""Content security policies of the page: which scripts, styles and requests a browser allows."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

# Of the live page: its own server and nothing else.
LIVE_PAGE = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)


def frozen_page(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Policy of a page in one file: these scripts and styles, by their SHA-256, and no request."""
    return (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests(styles)}; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _digests(texts: Sequence[str]) -> str:
    hashes = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
