"""The algebra of the terms' gradients: weighted sum, norms and cosines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Squares outside this range have lost digits in float32.
_SAFE_SQUARES = (1e-30, 1e30)


def weighted_sum(weights: Sequence[float], gradients: Sequence[Tensor]) -> Tensor:
    """Sum of weight * gradient over the terms, as a new vector."""
    total = gradients[0] * weights[0]
    for weight, gradient in zip(weights[1:], gradients[1:], strict=True):
        total.add_(gradient, alpha=weight)
    return total


def norms_and_cosines(gradients: Sequence[Tensor]) -> tuple[list[float], list[list[float]]]:
    """The L2 norm of each gradient, and the cosine of each pair, from one Gram matrix.

    A cosine with a zero gradient is 0.
    """
    rows = torch.stack(list(gradients))
    gram = _gram(rows if rows.dtype == torch.float64 else rows.float())
    squares = [gram[i][i] for i in range(len(gram))]
    low, high = _SAFE_SQUARES
    if not all(low < square < high for square in squares):
        gram = _gram(rows.double())
    norms = [math.sqrt(gram[i][i]) for i in range(len(gram))]
    cosines = [
        [_cosine(dot, norms[i] * norms[j]) for j, dot in enumerate(row)]
        for i, row in enumerate(gram)
    ]
    return norms, cosines


def _gram(rows: Tensor) -> list[list[float]]:
    return (rows @ rows.T).tolist()


def _cosine(dot: float, scale: float) -> float:
    if scale == 0:
        return 0.0
    cosine = dot / scale
    return cosine if math.isnan(cosine) else min(1.0, max(-1.0, cosine))
