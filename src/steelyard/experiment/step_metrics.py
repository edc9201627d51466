"""Reading one line of `metrics.jsonl`: which terms ran or were skipped, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_TERM, _RAN, _SKIPPED, _REASON = "regularizers/", "/contribution", "skipped/", "/reason"
_WORDS = 12


def terms_that_ran(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the terms that ran, in order."""
    return [
        key.removeprefix(_TERM).removesuffix(_RAN)
        for key in metrics
        if key.startswith(_TERM) and key.endswith(_RAN) and "/custom/" not in key
    ]


def reasons(skipped: Mapping[str, str]) -> dict[str, str]:
    """Keys of a line for why terms were skipped; `skipped/<name>`, a number, is beside them."""
    return {f"{_SKIPPED}{name}{_REASON}": reason for name, reason in skipped.items()}


def skipped_terms(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Reasons by the names of the terms that were skipped; empty where none was written.

    Example:
        >>> line = {"skipped/judge": 1.0, "skipped/judge/reason": "TermTimeoutError: too late"}
        >>> skipped_terms(line)
        {'judge': 'TermTimeoutError: too late'}
    """
    names = [
        key.removeprefix(_SKIPPED)
        for key, value in metrics.items()
        if key.startswith(_SKIPPED) and not isinstance(value, str)
    ]
    return {name: str(metrics.get(f"{_SKIPPED}{name}{_REASON}", "")) for name in names}


def short_reason(name: str, reason: str) -> str:
    """Class of the error and its first words, in one line.

    Example:
        >>> short_reason("judge", "TermError: regularizer 'judge' failed: OSError: it is away")
        'OSError: it is away'
    """
    words = reason.removeprefix(f"TermError: regularizer {name!r} failed: ").split()
    return " ".join([*words[:_WORDS], *(["…"] if len(words) > _WORDS else [])])


def gradient_shares(metrics: Mapping[str, Any], names: Iterable[str]) -> dict[str, float | None]:
    """Part of `"base"` and of each term in the sum of the norms of all weighted gradients.

    Norms are added although gradients may cancel: shares then always add up to 1. None where a
    term has no norm.
    """
    keys = {"base": "base_loss/grad_norm"}
    keys |= {name: f"{_TERM}{name}/grad_norm_weighted" for name in names}
    norms = {name: metrics.get(key) for name, key in keys.items()}
    whole = math.fsum(norm for norm in norms.values() if norm is not None)
    return {
        name: norm / whole if norm is not None and whole > 0 else None
        for name, norm in norms.items()
    }
