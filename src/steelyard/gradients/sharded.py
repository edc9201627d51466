"""Tensors that are spread over processes, torch's `DTensor`: whole values, inner products.

A process holds a part of such a tensor. A sum over all of its elements is the sum over the parts,
added up along the dimensions of its mesh on which it is sharded. Along the others it is replicated:
each process has the same part, which counts once.
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


def part_like(x: Tensor, like: Any) -> Tensor:
    """This process's part of a whole tensor that is sharded as `like` is, without communication."""
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - loaded, as above

    # src_data_rank=None: every process has the whole tensor, and none sends it.
    sharded = distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
    return local_part(sharded)


def sharded_like(x: Any, like: Any) -> Any:
    """A gradient of `like`, a `DTensor`, sharded as `like` is; itself, if it is so already.

    Parts that are to be added are added up; of a `like` with such parts, whole.
    """
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 - loaded: `like` is a DTensor

    wanted = tuple(Replicate() if p.is_partial() else p for p in like.placements)
    return x if x.placements == wanted else x.redistribute(placements=wanted)


def sharded_dimensions(x: Any) -> tuple[int, ...]:
    """Dimensions of the mesh along which a `DTensor` is sharded; it is the same along others."""
    return tuple(i for i, p in enumerate(x.placements) if not (p.is_replicate() or p.is_partial()))


def sum_over(mesh: Any, dimensions: Sequence[int], numbers: Tensor) -> Tensor:
    """Add up `numbers` along dimensions of a mesh, with one reduction for each.

    The result is on the device of the mesh: parameters that FSDP offloads are on another.
    """
    numbers = numbers.to(mesh.device_type)
    for dimension in dimensions:
        dist.all_reduce(numbers, group=mesh.get_group(dimension))
    return numbers


def sharded_gram(
    rows: Sequence[Sequence[Tensor | None]], like: Sequence[Tensor]
) -> list[list[float]]:
    """Gram matrix of rows whose entries may be `DTensor`s, in float64, equal on all processes.

    One reduction for all entries of one mesh: inner products are added up here first.

    Args:
        rows: gradients of one space.
        like: the tensors that the entries are gradients of; a collective operation has to be the
            same on all processes, whichever of them have a gradient.
    """
    count = len(rows)
    here = torch.zeros(count, count, dtype=torch.float64)
    by_mesh: dict[tuple[Any, tuple[int, ...]], Tensor] = {}
    for tensor, *column in zip(like, *rows, strict=True):
        if not is_sharded(tensor):
            here += _products(column).cpu()
            continue
        found = [None if x is None else local_part(sharded_like(x, tensor)) for x in column]
        products = _products(found)
        where = tensor.device_mesh, sharded_dimensions(tensor)
        total = by_mesh.setdefault(where, torch.zeros_like(products, device=tensor.device))
        total += products.to(total.device)
    for where, products in by_mesh.items():
        here += sum_over(*where, products).cpu()
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
