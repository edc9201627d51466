"""Norms and cosines of the terms' gradients, from the inner products of the components'.

With G the Gram matrix `[components, components]` and term i's gradient `sum_k S_ik g_k`, the inner
product of terms i and j is `sum_kl S_ik S_jl G_kl`. Row (i, j) of the matrix of factors
`S_ik S_jl` (`_outer`) times the flattened G gives them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, TypeAlias

from steelyard.penalties._arrays import Array, Namespace, is_torch

Shares: TypeAlias = tuple[tuple[float, ...], ...]


def grad_norms_and_cosines(
    xp: Namespace, names: Sequence[str], shares: Sequence[Sequence[float]], products: Array
) -> tuple[dict[str, Array], dict[tuple[str, str], Array]]:
    """Norm of each term's gradient and of the total's, and the cosines of all pairs.

    These are a handful of operations on one small matrix, and the results are views of theirs: on
    a GPU every operation costs more than its arithmetic.

    Args:
        xp: Namespace of the products.
        names: Names of the terms.
        shares: `[terms + 1, components]`: factors of the components in each term and, last, in the
            weighted total.
        products: `[components, components]`: the Gram matrix.
    """
    found = _by_kernel(products, shares) if is_torch(products) and products.is_cuda else None
    norms, cosines = _by_operations(xp, shares, products) if found is None else found
    return (
        dict(zip((*names, "total"), norms, strict=True)),
        dict(zip(combinations(names, 2), cosines, strict=True)),
    )


def _by_operations(
    xp: Namespace, shares: Sequence[Sequence[float]], products: Array
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Norms of the terms and the total, and cosines of all pairs of terms."""
    factors, used = _factors(xp, tuple(map(tuple, shares)), products)
    # A factor of 0 gives 0 even if another term's component is infinite, where 0 · inf is NaN.
    terms = xp.where(used, factors * xp.reshape(products, (-1,)), 0.0)
    inner = xp.sum(terms, axis=-1)
    squares = inner[:: len(shares) + 1]  # the diagonal
    norms = xp.sqrt(xp.where(squares < 0, 0.0, squares))
    both = xp.reshape(norms[:, None] * norms[None, :], (-1,))
    zero = both == 0
    cosines = list(xp.where(zero, 0.0, inner / xp.where(zero, 1.0, both)))
    pairs = combinations(range(len(shares) - 1), 2)
    return list(norms), [cosines[i * len(shares) + j] for i, j in pairs]


def _by_kernel(  # pragma: no cover  # by `make test-gpu`
    products: Any, shares: Sequence[Sequence[float]]
) -> tuple[Sequence[Array], Sequence[Array]] | None:
    """The same by one kernel, if there is one."""
    import torch  # noqa: PLC0415  # a tensor proves that it is there

    from steelyard.penalties.from_logits.cluster import finish, launch  # noqa: PLC0415  # need torch

    if type(products) is not torch.Tensor or torch.compiler.is_compiling() or not launch.ENABLED:
        return None
    found = finish.compare_gradients(products, shares)
    return None if found is None else (found[: len(shares)], found[len(shares) :])


def _factors(xp: Namespace, shares: Shares, like: Array) -> tuple[Array, Array]:
    """Factors `[pairs of terms, products]` and where they are not 0, on the device of `like`."""
    device = None
    if is_torch(like):
        import torch  # noqa: PLC0415  # a tensor proves that it is there

        # Under tracing they become constants of the graph, and Dynamo does not support the cache.
        if type(like) is torch.Tensor and not torch.compiler.is_compiling():
            return _cached_factors(shares, like.device)
        device = like.device
    factors = xp.asarray(_outer(shares), dtype=like.dtype, device=device)
    return factors, factors != 0


# Bounded: a weight that follows a schedule gives another key at every step.
@lru_cache(maxsize=64)
def _cached_factors(shares: Shares, device: Any) -> tuple[Array, Array]:
    import torch  # noqa: PLC0415  # a tensor proves that it is there

    factors = torch.tensor(_outer(shares), dtype=torch.float64)
    if device.type == "cuda":  # pragma: no cover  # by `make test-gpu`
        factors = factors.pin_memory()  # else the copy would wait for the GPU
    factors = factors.to(device, non_blocking=True)
    return factors, factors != 0


def _outer(shares: Shares) -> list[list[float]]:
    return [[x * y for x in a for y in b] for a in shares for b in shares]
