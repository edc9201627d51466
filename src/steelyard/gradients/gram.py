"""The algebra of the terms' gradients: weighted sum, norms and cosines."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement

import numpy as np
import torch
from torch import Tensor

# Squares outside this range have lost digits in float32.
_SAFE_SQUARES = (1e-30, 1e30)
# Up to so many vectors, products one by one are quicker than a matrix of all.
_FEW = 16


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
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, float],
    like: Tensor,
    *,
    tracked: bool,
    aside: Collection[str] = (),
) -> Pull:
    """The weighted sum of flat gradients; if tracked, also their norms and cosines.

    Args:
        gradients: by name.
        weights: by name.
        like: what the total looks like if there are no gradients.
        tracked: whether norms and cosines are wanted.
        aside: names that count in the total alone, since their norm is taken in another space.
    """
    if not gradients:
        return Pull(torch.zeros_like(like), 0.0, {}, {})
    vectors = list(gradients.values())
    total = _weighted_sum([weights[name] for name in gradients], vectors)
    total_norm = math.sqrt(_gram([total])[0][0])
    if not tracked:
        return Pull(total, total_norm, {}, {})
    names = [name for name in gradients if name not in aside]
    gram = _gram([gradients[name] for name in names]) if names else []
    norms = [math.sqrt(row[i]) for i, row in enumerate(gram)]
    cosines = {
        (a, b): cosine(gram[i][j], norms[i] * norms[j])
        for (i, a), (j, b) in combinations(enumerate(names), 2)
    }
    return Pull(total, total_norm, dict(zip(names, norms, strict=True)), cosines)


# NaN and infinity are the caller's to judge, as torch leaves them: NumPy need not warn.
_quietly = np.errstate(over="ignore", invalid="ignore", under="ignore")


@_quietly
def _weighted_sum(weights: Sequence[float], vectors: Sequence[Tensor]) -> Tensor:
    if not _suits_numpy(vectors[0]):
        total = vectors[0] * weights[0]
        for weight, vector in zip(weights[1:], vectors[1:], strict=True):
            total.add_(vector, alpha=weight)
        return total
    arrays = [vector.numpy() for vector in vectors]
    summed = arrays[0] * weights[0]
    scaled = np.empty_like(summed)
    for weight, array in zip(weights[1:], arrays[1:], strict=True):
        np.multiply(array, weight, out=scaled)
        summed += scaled
    return torch.from_numpy(summed)


def _gram(vectors: Sequence[Tensor]) -> list[list[float]]:
    """The inner products of all pairs, in float64 where float32 would lose digits."""
    gram = _inner_products(vectors)
    low, high = _SAFE_SQUARES
    if all(low < row[i] < high for i, row in enumerate(gram)):
        return gram
    return _inner_products([vector.double() for vector in vectors])


@_quietly
def _inner_products(vectors: Sequence[Tensor]) -> list[list[float]]:
    count = len(vectors)
    if count > _FEW or not _suits_numpy(vectors[0]):
        rows = torch.stack(list(vectors))
        rows = rows if rows.dtype == torch.float64 else rows.float()
        products: list[list[float]] = (rows @ rows.T).tolist()
        return products
    products = [[0.0] * count for _ in vectors]
    arrays = enumerate(vector.numpy() for vector in vectors)
    for (i, a), (j, b) in combinations_with_replacement(arrays, 2):
        products[i][j] = products[j][i] = float(np.dot(a, b))
    return products


def _suits_numpy(vector: Tensor) -> bool:
    """On a CPU NumPy is quicker: torch spreads such a vector over threads, to no gain."""
    return vector.device.type == "cpu" and vector.dtype in (torch.float32, torch.float64)


def cosine(dot: float, scale: float) -> float:
    """`dot` / `scale` within -1 and 1; 0 where a gradient is zero, NaN where it is NaN."""
    if scale == 0:
        return 0.0
    ratio = dot / scale
    return ratio if math.isnan(ratio) else min(1.0, max(-1.0, ratio))
