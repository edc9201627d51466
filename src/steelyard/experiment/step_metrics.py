"""Parse one line of `metrics.jsonl`: terms that ran or were skipped, and gradient shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_TERM, _RAN, _SKIPPED, _REASON = "regularizers/", "/contribution", "skipped/", "/reason"
_MAX_WORDS = 12  # of a shortened reason


def terms_that_ran(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the terms that ran in this step, in the order of the metrics."""
    return [
        key.removeprefix(_TERM).removesuffix(_RAN)
        for key in metrics
        if key.startswith(_TERM) and key.endswith(_RAN) and "/custom/" not in key
    ]


def skip_reasons(skipped: Mapping[str, str]) -> dict[str, str]:
    """Metrics `skipped/<name>/reason`; the output's metrics have `skipped/<name>`, a number."""
    return {f"{_SKIPPED}{name}{_REASON}": reason for name, reason in skipped.items()}


def skipped_terms(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Reason for each skipped term, by name; an empty string if the line holds none.

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
    """Shorten the reason of a skipped term to the class of the error and its first words.

    Example:
        >>> short_reason("judge", "TermError: regularizer 'judge' failed: OSError: it is away")
        'OSError: it is away'
    """
    words = reason.removeprefix(f"TermError: regularizer {name!r} failed: ").split()
    return " ".join([*words[:_MAX_WORDS], *(["…"] if len(words) > _MAX_WORDS else [])])


def gradient_shares(metrics: Mapping[str, Any], names: Iterable[str]) -> dict[str, float | None]:
    """Share of `"base"` and of each term in the sum of the norms of all weighted gradients.

    `share_i = ||w_i g_i|| / sum_j ||w_j g_j||`. The norms are added, not the gradients, which may
    cancel: shares always add up to 1. None for a term without a norm, or if all norms are 0.

    Example:
        >>> line = {"base_loss/grad_norm": 3.0, "regularizers/kl/grad_norm_weighted": 1.0}
        >>> gradient_shares(line, ["kl", "judge"])
        {'base': 0.75, 'kl': 0.25, 'judge': None}
    """
    keys = {"base": "base_loss/grad_norm"}
    keys |= {name: f"{_TERM}{name}/grad_norm_weighted" for name in names}
    norms = {name: metrics.get(key) for name, key in keys.items()}
    total = math.fsum(norm for norm in norms.values() if norm is not None)
    return {
        name: norm / total if norm is not None and total > 0 else None
        for name, norm in norms.items()
    }
