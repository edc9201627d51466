"""Data and tokens with the largest share of a term's gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from steelyard.errors import InputError


class TokenShare(NamedTuple):
    """Share of one token.

    Attributes:
        position: index of the token in the log-probs of its datum.
        share: its part of the whole gradient of the term.
    """

    position: int
    share: float


@dataclass(frozen=True)
class Driver:
    """A datum that drives a term, and its tokens.

    With g the gradient of the term with respect to all log-probs of the batch, a token has the
    share Σ|g| over its log-probs / Σ|g| over all log-probs. A token has one log-prob for `[T]`
    and K of them for `[T, K]`. The share of a datum is the sum over its tokens, so the shares of
    all data add up to 1. If every log-prob moves by at most ε, the token changes the term by at
    most ε · Σ|g| over its log-probs, to first order.

    Attributes:
        datum: index of the datum in the batch.
        share: its part of the whole gradient of the term.
        tokens: its tokens with a share above 0, the largest first.
    """

    datum: int
    share: float
    tokens: tuple[TokenShare, ...]


def find_drivers(gradients: Any, n: int) -> list[Driver]:
    """The `n` data with the largest share of a gradient, the largest first.

    Args:
        gradients: d term / d logprobs, a tensor per datum in a list; or one tensor, one datum.
        n: number of data; those with a share of 0 are left out.

    Raises:
        InputError: the gradient is not finite.
    """
    data = gradients if isinstance(gradients, Sequence) else [gradients]
    by_token = [_sizes(gradient) for gradient in data]
    by_datum = [float(sizes.sum()) for sizes in by_token]
    total = math.fsum(by_datum)
    if not math.isfinite(total):
        raise InputError(f"the gradient must be finite to find its drivers, got a sum of {total}.")
    # Equal shares stay in the order of the batch: the sort is stable.
    order = sorted(range(len(data)), key=lambda index: -by_datum[index])[:n]
    return [
        Driver(index, by_datum[index] / total, _tokens(by_token[index], total))
        for index in order
        if by_datum[index] > 0
    ]


def _sizes(gradient: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Σ|g| of each token: over all dimensions but the first."""
    values = np.atleast_1d(np.abs(gradient.detach().cpu().double().numpy()))
    sizes: np.ndarray[Any, np.dtype[np.float64]] = values.sum(axis=tuple(range(1, values.ndim)))
    return sizes


def _tokens(sizes: np.ndarray[Any, np.dtype[np.float64]], total: float) -> tuple[TokenShare, ...]:
    order = np.argsort(-sizes, kind="stable")
    return tuple(TokenShare(int(i), float(sizes[i]) / total) for i in order if sizes[i] > 0)
