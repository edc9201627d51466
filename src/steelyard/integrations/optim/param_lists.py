"""The parameters of an optimizer beside their gradients, and lists of them for `foreach`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steelyard.errors import InputError

# What a transform may hold beside the gradients, in elements: on a CPU little enough to stay in
# the cache, elsewhere enough for few launches.
_ON_CPU, _ELSEWHERE = 2**20, 2**24
_LISTED = 8


@dataclass(frozen=True)
class Slot:
    """One parameter and the group it is in."""

    parameter: Tensor
    group: Mapping[str, Any]  # the optimizer's own options
    label: str

    @property
    def gradient(self) -> Tensor:
        """Its gradient; of a sparse one the stored values, which can be changed in place."""
        gradient = self.parameter.grad
        assert gradient is not None  # noqa: S101 - `ready` lets no other through
        return gradient.values() if gradient.is_sparse else gradient

    @property
    def rows(self) -> Tensor | None:
        """For a gradient with only some rows stored, which: sparse embeddings have such."""
        gradient = self.parameter.grad
        return gradient.indices()[0] if gradient is not None and gradient.is_sparse else None


def slots_of(optimizer: Optimizer) -> list[Slot]:
    """Every parameter; it is called by its name where the optimizer was given names."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or ()
        for place, parameter in enumerate(group["params"]):
            label = f"parameter {place} of group {number}, shape {tuple(parameter.shape)}"
            found.append(Slot(parameter, group, names[place] if names else label))
    return found


def ready(slots: Sequence[Slot]) -> list[Slot]:
    """Those that have a gradient, sparse ones with each row stored once.

    Raises:
        InputError: None has one, or one has a layout that is neither dense nor by rows.
    """
    there = [slot for slot in slots if slot.parameter.grad is not None]
    if not there:
        raise InputError(
            "an optimizer with transforms must step with gradients, got none for any of its "
            f"{len(slots)} parameters ({labels(slots)}): call loss.backward() before step()."
        )
    for slot in there:
        gradient = slot.parameter.grad
        if gradient is None or gradient.layout is torch.strided:
            continue
        if not gradient.is_sparse or gradient.sparse_dim() != 1:
            raise InputError(
                "a gradient must be dense, or sparse by rows (one sparse dimension), got layout "
                f"{gradient.layout} for {slot.label}: make it dense with to_dense()."
            )
        slot.parameter.grad = gradient.coalesce()
    return there


def refuse_sparse(slots: Sequence[Slot], name: str, cure: str) -> None:
    """Raise if a gradient is sparse, for a transform whose result would not be."""
    for slot in slots:
        if slot.rows is not None:
            raise InputError(
                f"{name} must have dense gradients, since it changes every element, got a sparse "
                f"one for {slot.label}: {cure}."
            )


def labels(slots: Sequence[Slot]) -> str:
    """What the parameters are called, the first few of them."""
    shown = [slot.label for slot in slots[:_LISTED]]
    return "; ".join([*shown, "…"] if len(slots) > _LISTED else shown)


def batches(*columns: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Aligned lists of tensors, each of one device and dtype and of bounded size.

    Large tensors are cut along their first axis, so that temporary copies stay small.
    """
    kinds: dict[object, list[tuple[Tensor, ...]]] = {}
    for row in zip(*columns, strict=True):
        kinds.setdefault((row[0].device, row[0].dtype), []).append(row)
    for rows in kinds.values():
        limit = _limit(rows[0][0])
        for batch in _filled((piece for row in rows for piece in pieces(*row)), limit):
            yield tuple(list(column) for column in zip(*batch, strict=True))


def pieces(*row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one length, cut along their first axis where the first of them is large."""
    first, limit = row[0], _limit(row[0])
    if first.numel() <= limit:
        return iter([row])
    each = max(1, limit * first.shape[0] // first.numel())
    return zip(*(torch.split(tensor, each) for tensor in row), strict=True)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype in which to reduce a tensor: float16 and bfloat16 in float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def chosen(slots: Sequence[Slot], where: Callable[[Tensor], bool] | None) -> list[Slot]:
    """Those whose parameter `where` says yes to."""
    return [slot for slot in slots if where is None or where(slot.parameter)]


def _limit(tensor: Tensor) -> int:
    return _ON_CPU if tensor.device.type == "cpu" else _ELSEWHERE


def _filled(pieces: Iterator[tuple[Tensor, ...]], limit: int) -> Iterator[list[tuple[Tensor, ...]]]:
    batch: list[tuple[Tensor, ...]] = []
    size = 0
    for piece in pieces:
        if batch and size + piece[0].numel() > limit:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece[0].numel()
    yield batch
