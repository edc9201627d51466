"""The algebra of the terms' gradients: weighted sum, norms and cosines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

# Squares outside this range have lost digits in float32.
_SAFE_SQUARES = (1e-30, 1e30)


@dataclass(frozen=True)
class Pull:
    """Where some gradients pull together, and how they lie to each other.

    Attributes:
        total: sum of weight * gradient.
        total_norm: its L2 norm.
        norms: the L2 norm of each gradient, by name; empty unless tracked.
        cosines: the cosine of each pair, in the order of the names; 0 where a gradient is zero.
    """

    total: Tensor
    total_norm: float
    norms: Mapping[str, float]
    cosines: Mapping[tuple[str, str], float]


def combine(
    gradients: Mapping[str, Tensor], weights: Mapping[str, float], like: Tensor, *, tracked: bool
) -> Pull:
    """The weighted sum of flat gradients; if tracked, from one matrix with norms and cosines.

    Args:
        gradients: by name.
        weights: by name.
        like: what the total looks like if there are no gradients.
        tracked: whether norms and cosines are wanted.
    """
    factors = [weights[name] for name in gradients]
    if not gradients:
        return Pull(torch.zeros_like(like), 0.0, {}, {})
    if not tracked:
        total = _weighted_sum(factors, list(gradients.values()))
        return Pull(total, _norm(total), {}, {})
    rows = torch.stack(list(gradients.values()))
    gram = _gram(rows)
    norms = [math.sqrt(row[i]) for i, row in enumerate(gram)]
    cosines = {
        (a, b): _cosine(gram[i][j], norms[i] * norms[j])
        for (i, a), (j, b) in combinations(enumerate(gradients), 2)
    }
    total = rows.new_tensor(factors) @ rows
    return Pull(total, _norm(total), dict(zip(gradients, norms, strict=True)), cosines)


def _weighted_sum(weights: Sequence[float], gradients: Sequence[Tensor]) -> Tensor:
    total = gradients[0] * weights[0]
    for weight, gradient in zip(weights[1:], gradients[1:], strict=True):
        total.add_(gradient, alpha=weight)
    return total


def _norm(vector: Tensor) -> float:
    square: float = torch.dot(vector, vector).item()
    if not _SAFE_SQUARES[0] < square < _SAFE_SQUARES[1]:
        square = vector.double().square().sum().item()
    return math.sqrt(square)


def _gram(rows: Tensor) -> list[list[float]]:
    """The inner products of all pairs of rows, in float64 where float32 would lose digits."""
    rows = rows if rows.dtype == torch.float64 else rows.float()
    gram: list[list[float]] = (rows @ rows.T).tolist()
    low, high = _SAFE_SQUARES
    if not all(low < row[i] < high for i, row in enumerate(gram)):
        rows = rows.double()
        gram = (rows @ rows.T).tolist()
    return gram


def _cosine(dot: float, scale: float) -> float:
    if scale == 0:
        return 0.0
    cosine = dot / scale
    return cosine if math.isnan(cosine) else min(1.0, max(-1.0, cosine))
