"""Algebra of the terms' gradients: derivatives, weighted sums, Gram matrix, norms, cosines.

A term's gradient is a *row*: one tensor for each tensor it is differentiated with respect to, None
where there is no path. A row has one entry, `[N]`, for the flat vector of log-probs, and several
for the inputs of a composite or the parameters of a model.

With rows g₁ … gₙ of one space, the Gram matrix is Gᵢⱼ = ⟨gᵢ, gⱼ⟩, summed over all entries. It holds
all that is reported: ‖gᵢ‖ = √Gᵢᵢ and cos(i, j) = Gᵢⱼ / √(Gᵢᵢ Gⱼⱼ). The gradient of the composed
loss is Σ wᵢ gᵢ, so each term is differentiated once and no further backward pass is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, combinations_with_replacement
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from steelyard.gradients.layout import Nest, tensors_in
from steelyard.gradients.parse_result import check_finite

Row: TypeAlias = Sequence[Tensor | None]
# float32 overflows at 3e38 and is denormal below 1e-38: squares outside of this range have lost
# digits, or all of them, and the Gram matrix is computed again in float64.
_SAFE_SQUARES = (1e-30, 1e30)
# The caller checks for NaN and infinity, so that NumPy should not warn, as torch does not.
_quietly = np.errstate(over="ignore", invalid="ignore", under="ignore")


def differentiate(loss: Tensor, inputs: Sequence[Tensor]) -> Row:
    """Gradient of `loss` with respect to each of `inputs`, in one backward pass."""
    free = [x for x in inputs if x.requires_grad]
    if not free or not loss.requires_grad:
        return [None] * len(inputs)
    # Terms may share a part of their graphs, such as a cached tensor.
    gradients: Row = torch.autograd.grad(loss, free, retain_graph=True, allow_unused=True)
    if len(free) == len(inputs):
        return gradients
    remaining = iter(gradients)
    return [next(remaining) if x.requires_grad else None for x in inputs]


def split_gradient(
    loss: Tensor, leaf: Tensor, extra: Mapping[str, Nest]
) -> tuple[Tensor | None, dict[str, Row]]:
    """Gradient with respect to the leaf, and with respect to extra inputs, by need.

    Every need has an entry if there is a path to any of them; otherwise the mapping is empty.
    """
    if not extra:
        return differentiate(loss, [leaf])[0], {}
    tensors = {need: list(tensors_in(nest)) for need, nest in extra.items()}
    gradient, *rest = differentiate(loss, [leaf, *(t for ts in tensors.values() for t in ts)])
    if all(gradient_of_input is None for gradient_of_input in rest):
        return gradient, {}
    remaining = iter(rest)
    return gradient, {need: [next(remaining) for _ in ts] for need, ts in tensors.items()}


def check_gradient(term: str, row: Row) -> None:
    """Check that a gradient is finite.

    Raises:
        NonFiniteError: it is not.
    """
    for gradient in row:
        bad = gradient[~torch.isfinite(gradient)] if gradient is not None else None
        if bad is not None and bad.numel():
            worst = math.nan if bool(bad.isnan().any()) else bad[0].item()
            check_finite(term, worst, "gradient")


@_quietly
def weighted_sum(weights: Sequence[float], rows: Sequence[Row]) -> list[Tensor | None]:
    """Σ weight · row, entry by entry; None where no row has a gradient."""
    return [_sum_of_column(weights, column) for column in zip(*rows, strict=True)]


def norm_of(row: Row) -> float:
    """L2 norm of a row, over all of its entries: √Σ‖entry‖²."""
    return math.sqrt(gram([row])[0][0])


@_quietly
def gram(rows: Sequence[Row], *, in_float64: bool = False) -> list[list[float]]:
    """Gram matrix of the rows, `[n][n]`, in float64 where float32 would lose digits.

    Args:
        rows: gradients of one space.
        in_float64: sum in float64 in any case.
    """
    if not in_float64:
        products = _inner_products(rows)
        low, high = _SAFE_SQUARES
        if all(low < products[i][i] < high for i in range(len(rows))):
            return products
    return _inner_products([[x if x is None else x.double() for x in row] for row in rows])


def norms_and_cosines(
    names: Sequence[str], products: Sequence[Sequence[float]]
) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Norm √Gᵢᵢ of each row and cosine Gᵢⱼ / √(Gᵢᵢ Gⱼⱼ) of each pair, from the Gram matrix."""
    norms = [math.sqrt(row[i]) for i, row in enumerate(products)]
    cosines = {
        (a, b): _cosine(products[i][j], norms[i] * norms[j])
        for (i, a), (j, b) in combinations(enumerate(names), 2)
    }
    return dict(zip(names, norms, strict=True)), cosines


def _sum_of_column(weights: Sequence[float], column: Row) -> Tensor | None:
    pairs = [(w, x) for w, x in zip(weights, column, strict=True) if x is not None]
    if not pairs:
        return None
    (weight, first), *rest = pairs
    if not _suits_numpy(first):
        total = first * weight
        for w, x in rest:
            total.add_(x, alpha=w)
        return total
    summed = first.numpy() * weight
    scaled = np.empty_like(summed)
    for w, x in rest:
        np.multiply(x.numpy(), w, out=scaled)
        summed += scaled
    return torch.from_numpy(summed)


def _inner_products(rows: Sequence[Row]) -> list[list[float]]:
    """Gram matrix, summed entry by entry, so that no row is copied into one long vector."""
    count = len(rows)
    products = [[0.0] * count for _ in rows]
    on_device = None  # summed on the device, and read in one transfer
    for column in zip(*rows, strict=True):
        there = {i: _wide(x) for i, x in enumerate(column) if x is not None}
        if not there:
            continue
        like = next(iter(there.values()))
        if _suits_numpy(like):
            arrays = [(i, x.numpy().reshape(-1)) for i, x in there.items()]
            for (i, a), (j, b) in combinations_with_replacement(arrays, 2):
                products[i][j] += float(np.dot(a, b))
        else:
            empty = torch.zeros_like(like)
            stacked = torch.stack([there.get(i, empty) for i in range(count)]).reshape(count, -1)
            square = stacked @ stacked.T
            on_device = square if on_device is None else on_device + square
    if on_device is not None:
        numbers = on_device.tolist()
        products = [
            [a + b for a, b in zip(p, q, strict=True)]
            for p, q in zip(products, numbers, strict=True)
        ]
    for i, j in combinations(range(count), 2):
        products[j][i] = products[i][j]
    return products


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _suits_numpy(x: Tensor) -> bool:
    """Whether NumPy is faster: on a CPU torch starts threads for such vectors, without a gain."""
    return x.dim() > 0 and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _cosine(product: float, scale: float) -> float:
    """`product` / `scale`, clamped to [-1, 1]; 0 if a gradient is zero, NaN if it is NaN."""
    if scale == 0:
        return 0.0
    ratio = product / scale
    return ratio if math.isnan(ratio) else min(1.0, max(-1.0, ratio))
