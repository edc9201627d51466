"""Tensors that are spread over processes, torch's `DTensor`, and gradients of a module under FSDP2.

A process holds a part of such a tensor. A sum over all of its elements is the sum over the parts,
added up along the dimensions of its mesh on which it is sharded. Along the others it is replicated:
each process has the same part, which counts once.

The forward pass of a module under FSDP2 (`torch.distributed.fsdp.fully_shard`) computes with whole
parameters, which FSDP gathers and frees; they are the leaves of the graph. Hooks of FSDP average
their gradients over the processes, and store each process's part in `grad` of the sharded
parameter. `torch.autograd.grad` passes these hooks by: it finds no path to the sharded parameters.
So a term is differentiated by a backward pass of its own, and what training has accumulated is put
aside meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from steelyard._torch_internals import (
    FSDP_OF_GROUP,
    FSDP_OF_MODULE,
    FSDP_OF_PARAMETER,
    fsdp_state,
    fsdp_tensors,
    is_fully_sharded,
)
from steelyard.errors import GradientError


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
        local = [None if x is None else local_part(sharded_like(x, tensor)) for x in column]
        products = _products(local)
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


class FullyShardedParameters:
    """The trained parameters of a module that `fully_shard` was applied to.

    Args:
        module: the module, after a forward pass.

    Attributes:
        parameters: the sharded parameters that require a gradient, each a `DTensor`.

    Raises:
        GradientError: a trained parameter is not managed by FSDP within the module, or torch's
            FSDP is not the one that is known here.
    """

    def __init__(self, module: nn.Module) -> None:
        self._contexts, self._groups = fsdp_state(module)
        every = [managed for group in self._groups for managed in group.fsdp_params]
        # After a forward pass a module may still have its gathered parameters.
        known = {id(tensor): managed for managed in every for tensor in fsdp_tensors(managed)}
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            if id(parameter) not in known:
                raise GradientError(
                    f"norms with respect to a module under FSDP need fully_shard on the module "
                    f"itself, got the parameter {name!r}, which it does not manage: pass the "
                    f"module that fully_shard was applied to, or wrt=None."
                )
        self._managed = [known[id(p)] for p in trained.values()]
        self.parameters: list[Tensor] = [managed.sharded_param for managed in self._managed]

    def differentiate(self, loss: Tensor) -> Sequence[Tensor | None]:
        """This process's part of the gradient of `loss`, averaged over the processes.

        A collective operation: every process calls it, with a loss of the same modules.
        """
        leaves = [tensor for managed in self._managed for tensor in fsdp_tensors(managed)]
        gathered = [group for group in self._groups if group.is_unsharded]
        with self._gradients_put_aside(leaves):
            torch.autograd.backward(loss, retain_graph=True, inputs=leaves)
            row = [p.grad for p in self.parameters]
        # The backward pass has freed them, and another may begin with a term that reads them.
        for group in gathered:
            group.unshard()
            group.wait_for_unshard()
        return row

    @contextmanager
    def _gradients_put_aside(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        wanted: list[tuple[Any, str, Any]] = [(leaf, "grad", None) for leaf in leaves]
        for owners, values in (
            (self._contexts, FSDP_OF_MODULE),
            (self._groups, FSDP_OF_GROUP),
            (self._managed, FSDP_OF_PARAMETER),
        ):
            wanted += [(owner, *item) for owner in owners for item in values.items()]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
        _set(wanted)
        try:
            yield
        finally:
            _set(before)


def named_shards(module: nn.Module) -> dict[str, Tensor]:
    """Parameters of a module by name, each as it is trained.

    After a forward pass FSDP leaves some of its parameters gathered in their modules: whole tensors
    without the shards' gradients. Their shards are returned in their place.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    if not is_fully_sharded(module):
        return parameters
    managed = [parameter for group in fsdp_state(module)[1] for parameter in group.fsdp_params]
    shards = {
        id(tensor): parameter.sharded_param
        for parameter in managed
        for tensor in fsdp_tensors(parameter)
    }
    return {name: shards.get(id(tensor), tensor) for name, tensor in parameters.items()}


def _set(values: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, value in values:
        setattr(owner, name, value)
