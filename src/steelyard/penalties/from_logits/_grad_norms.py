"""Norms and cosines of the terms' gradients, from the inner products of the components'."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, TypeAlias

from steelyard.penalties._arrays import Array, Namespace, is_torch

Shares: TypeAlias = tuple[tuple[float, ...], ...]


def tracked(
    xp: Namespace, names: Sequence[str], shares: Sequence[Sequence[float]], products: Array
) -> tuple[dict[str, Array], dict[tuple[str, str], Array]]:
    """The norm of each term's gradient and of the total's, and all pairs' cosines.

    All of it is a handful of operations on one small matrix, of which the results are views: on
    a GPU each operation costs more than its arithmetic.

    Args:
        xp: The namespace of the products.
        names: The terms'.
        shares: How much of each component each term is, and, last, the weighted total.
        products: `[components, components]`.
    """
    factors, there = _factors(xp, tuple(map(tuple, shares)), products)
    # Not where the factor is 0: a component that is infinite is none of that term's business.
    terms = xp.where(there, factors * xp.reshape(products, (-1,)), 0.0)
    inner = xp.sum(terms, axis=-1)
    squares = inner[:: len(shares) + 1]
    norms = xp.sqrt(xp.where(squares < 0, 0.0, squares))
    both = xp.reshape(norms[:, None] * norms[None, :], (-1,))
    nothing = both == 0
    cosines = list(xp.where(nothing, 0.0, inner / xp.where(nothing, 1.0, both)))
    pairs = combinations(range(len(names)), 2)
    return (
        dict(zip((*names, "total"), norms, strict=True)),
        {(names[i], names[j]): cosines[i * len(shares) + j] for i, j in pairs},
    )


def _factors(xp: Namespace, shares: Shares, like: Array) -> tuple[Array, Array]:
    """What each product counts in each pair of terms, and where that is not 0, beside `like`."""
    device = None
    if is_torch(like):
        import torch  # noqa: PLC0415  # a tensor proves that it is there

        # What is traced keeps nothing: a graph has them as constants, and Dynamo knows no cache.
        if type(like) is torch.Tensor and not torch.compiler.is_compiling():
            return _kept(shares, like.device)
        device = like.device
    factors = xp.asarray(_outer(shares), dtype=like.dtype, device=device)
    return factors, factors != 0


# Not for ever: a weight that follows a schedule is another one at every step.
@lru_cache(maxsize=64)
def _kept(shares: Shares, device: Any) -> tuple[Array, Array]:
    import torch  # noqa: PLC0415  # a tensor proves that it is there

    factors = torch.tensor(_outer(shares), dtype=torch.float64)
    if device.type == "cuda":  # pragma: no cover  # by `make test-gpu`
        factors = factors.pin_memory()  # else the copy would wait for the GPU
    factors = factors.to(device, non_blocking=True)
    return factors, factors != 0


def _outer(shares: Shares) -> list[list[float]]:
    return [[x * y for x in a for y in b] for a in shares for b in shares]
