"""Tensors that are spread over processes, torch's `DTensor`: whole values, inner products.

A process holds a part of such a tensor. A sum over all of its elements is the sum over the parts,
added up over the processes of its mesh; along a dimension of the mesh on which the tensor is
replicated, each process holds the same part, which must count once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def is_sharded(x: object) -> bool:
    """Whether `x` is a `DTensor`; without importing the module that defines it."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(x, tensors.DTensor)


def whole(x: Tensor) -> Tensor:
    """The whole tensor on each process, differentiable; a plain tensor as it is.

    For a `DTensor` a collective operation: every process of its mesh must call it.
    """
    full: Tensor = x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]
    return full


def local_part(x: Tensor) -> Tensor:
    """This process's part of a tensor, over the same memory, without a graph."""
    if not is_sharded(x):
        return x
    with torch.no_grad():
        part: Tensor = x.to_local()  # type: ignore[attr-defined]
    return part


def copies_of(x: Any) -> int:
    """Number of processes that hold the same part of a `DTensor`."""
    count = 1
    for size, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        count *= size if placement.is_replicate() else 1
    return count


def without_partial(x: Any) -> Any:
    """A `DTensor` whose parts are to be added, as one that holds the sums; others as they are."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - loaded: `x` is one

    if not any(placement.is_partial() for placement in x.placements):
        return x
    return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])


def sum_over(mesh: Any, numbers: Tensor) -> Tensor:
    """Add up `numbers` over the processes of a mesh, in place; with one reduction as a rule."""
    if mesh.ndim == 1:
        dist.all_reduce(numbers, group=mesh.get_group())
    elif mesh.size() == dist.get_world_size():
        dist.all_reduce(numbers)
    else:
        for dimension in range(mesh.ndim):
            dist.all_reduce(numbers, group=mesh.get_group(dimension))
    return numbers


def sharded_gram(
    rows: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]
) -> list[list[float]]:
    """Gram matrix of rows whose entries may be `DTensor`s, in float64, equal on all processes.

    One reduction for all entries of one mesh: local inner products are added up here, and over
    the processes at the end.

    Args:
        rows: gradients of one space.
        like: the tensors that the entries are gradients of; a collective operation has to be the
            same on all processes, whichever of them have a gradient.
    """
    count = len(rows)
    here = torch.zeros(count, count, dtype=torch.float64)
    by_mesh: dict[Any, Tensor] = {}
    for tensor, *column in zip(like, *rows, strict=True):
        if not is_sharded(tensor):
            here += _products(column).cpu()
            continue
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        found = [None if x is None else without_partial(x) for x in column]
        products = _products([None if x is None else local_part(x) for x in found])
        held = [copies_of(x) for x in found if x is not None]
        products /= max(held, default=1)
        total = by_mesh.setdefault(mesh, torch.zeros_like(products))
        total += products.to(total.device)
    for mesh, products in by_mesh.items():
        here += sum_over(mesh, products).cpu()
    return here.tolist()


def _products(column: Sequence[Tensor | None]) -> Tensor:
    """Inner products of the entries of one column, `[rows, rows]` in float64; None counts as 0."""
    there = [x for x in column if x is not None]
    count = len(column)
    if not there:
        return torch.zeros(count, count, dtype=torch.float64)
    empty = torch.zeros_like(there[0])
    stacked = torch.stack([empty if x is None else x for x in column]).reshape(count, -1).double()
    return stacked @ stacked.T
