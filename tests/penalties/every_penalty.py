"""All penalties of one and of two arrays, for the rules that hold for each of them."""

from __future__ import annotations

from typing import Any

from steelyard import penalties

ONE: list[Any] = [
    penalties.l1,
    penalties.l2,
    penalties.elastic_net,
    penalties.entropy,
    penalties.orthogonality,
    penalties.output_magnitude_penalty,
    penalties.validate,
]

TWO: list[Any] = [penalties.kl_divergence, penalties.js_divergence, penalties.consistency]

MASKED: list[Any] = [penalties.l1, penalties.l2, penalties.elastic_net, penalties.entropy, *TWO]


def call(fn: Any, x: Any, **options: Any) -> Any:
    return fn(x, x, **options) if fn in TWO else fn(x, **options)
