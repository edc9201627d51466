"""Divergences and entropy of `[T, K]` log-probs, one value a token, in operations of torch alone.

The functions of `penalties` check their inputs and work on every kind of array; these are the same
formulas as torch.fx can trace them, for the forms per datum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Stands for log 0, as in `penalties`: 0 · LOG_ZERO is 0, where 0 · (-inf) would be NaN.
_LOG_ZERO = -1e30
_MAX_LOG_RATIO = 100.0


def kl_rows(p: Tensor, r: Tensor, direction: str) -> Tensor:
    """`penalties.kl_divergence` of each row of log-probs."""
    if direction == "forward":
        return _kl(p, r)
    if direction == "reverse":
        return _kl(r, p)
    return 0.5 * (_kl(p, r) + _kl(r, p))


def js_rows(p: Tensor, r: Tensor) -> Tensor:
    """`penalties.js_divergence` of each row of log-probs."""
    p, r = p.clamp_min(_LOG_ZERO), r.clamp_min(_LOG_ZERO)
    log_m = torch.logaddexp(p, r) - math.log(2)
    rows = 0.5 * (p.exp() * (p - log_m) + r.exp() * (r - log_m)).sum(-1)
    # Rounding may leave p = r slightly below 0; corrected by a constant, which keeps the gradient.
    return rows + (rows.clamp_min(0.0) - rows).detach()


def entropy_rows(logprobs: Tensor, temperature: float = 1.0) -> Tensor:
    """`penalties.entropy` of each row of log-probs."""
    logprobs = logprobs.clamp_min(_LOG_ZERO)
    if temperature != 1:
        logprobs = (logprobs / temperature).log_softmax(-1).clamp_min(_LOG_ZERO)
    return -(logprobs.exp() * logprobs).sum(-1)


def _kl(p: Tensor, r: Tensor) -> Tensor:
    ratio = (p - r.clamp_min(_LOG_ZERO)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (p.exp() * ratio).sum(-1)
