"""Base class of gradient transforms, and the parameters they work on: in lists, and in shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from steelyard.errors import InputError, SpecError
from steelyard.gradients.sharded import (
    is_sharded,
    local_part,
    sharded_dimensions,
    sharded_like,
    sum_over,
)
from steelyard.spec.checks import is_finite


def divides_units(parameter: Any) -> bool:
    """Whether processes share output units, the elements of the first axis; a vector is one."""
    return is_sharded(parameter) and bool(unit_dimensions(parameter))


def unit_dimensions(parameter: Any) -> tuple[int, ...]:
    """Dimensions of the mesh of a `DTensor` along which an output unit is shared."""
    return tuple(
        i
        for i in sharded_dimensions(parameter)
        if parameter.ndim == 1 or parameter.placements[i].dim != 0
    )


def add_up(
    sums: Sequence[Tensor], parameters: Sequence[Any], dimensions: Sequence[tuple[int, ...]]
) -> list[Tensor]:
    """Add up sums over the parts of sharded parameters, with one reduction for those of one mesh.

    Args:
        sums: One tensor for each parameter, summed over this process's part of it.
        parameters: The parameters, each a `DTensor`.
        dimensions: For each parameter, the dimensions of its mesh to add up along.
    """
    totals_by_parameter = list(sums)
    groups: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for i, (parameter, along) in enumerate(zip(parameters, dimensions, strict=True)):
        groups.setdefault((parameter.device_mesh, along), []).append(i)
    for where, mine in groups.items():
        flat = [totals_by_parameter[i].reshape(-1).double() for i in mine]
        summed = sum_over(*where, torch.cat(flat))
        totals = torch.split(summed, [tensor.numel() for tensor in flat])
        for i, total in zip(mine, totals, strict=True):
            totals_by_parameter[i] = total.reshape(totals_by_parameter[i].shape).to(
                totals_by_parameter[i]
            )
    return totals_by_parameter


# The most elements of one batch, and so of a transform's temporary copies: on a CPU few enough to
# stay in the cache, elsewhere enough for few kernel launches.
_CPU_BATCH_SIZE, _DEVICE_BATCH_SIZE = 2**20, 2**24
_MAX_LABELS = 8


@dataclass(frozen=True)
class Slot:
    """A parameter of an optimizer.

    Of a sharded parameter (a `DTensor`, as under FSDP2) `weights` and `gradient` are this process's
    parts; a transform changes them in place, and `partial_sums` adds up over the processes.

    Attributes:
        parameter: The parameter as the optimizer has it.
        group: The optimizer's options for them.
        label: Their name in messages.
    """

    parameter: Tensor
    group: Mapping[str, Any]
    label: str

    @property
    def weights(self) -> Tensor:
        """Values of the parameter, to be changed in place."""
        return local_part(self.parameter)

    @property
    def gradient(self) -> Tensor:
        """Gradient of the parameter; of a sparse one the stored values, to be changed in place."""
        gradient = self.parameter.grad
        assert gradient is not None  # noqa: S101 - `with_gradients` drops all others
        return gradient.values() if gradient.is_sparse else local_part(gradient)

    @property
    def rows(self) -> Tensor | None:
        """Indices of the stored rows of a sparse gradient; None for a dense one."""
        gradient = self.parameter.grad
        return gradient.indices()[0] if gradient is not None and gradient.is_sparse else None


def slots_of(optimizer: Optimizer) -> list[Slot]:
    """Every parameter, labelled by its name if the optimizer was given names."""
    slots = []
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or ()
        for index, parameter in enumerate(group["params"]):
            label = f"parameter {index} of group {group_index}, shape {tuple(parameter.shape)}"
            slots.append(Slot(parameter, group, names[index] if names else label))
    return slots


def with_gradients(slots: Sequence[Slot]) -> list[Slot]:
    """Slots that have a gradient; sparse gradients are coalesced, each row stored once.

    The gradient of a sharded parameter is sharded in the same way afterwards.

    Raises:
        InputError: None has one, or one has a layout that is neither dense nor sparse by rows.
    """
    present = [slot for slot in slots if slot.parameter.grad is not None]
    if not present:
        raise InputError(
            "an optimizer with transforms must step with gradients, got none for any of its "
            f"{len(slots)} parameters ({labels(slots)}): call loss.backward() before step()."
        )
    for slot in present:
        gradient = slot.parameter.grad
        if is_sharded(slot.parameter):
            slot.parameter.grad = sharded_like(gradient, slot.parameter)
            continue
        if gradient is None or gradient.layout is torch.strided:
            continue
        if not gradient.is_sparse or gradient.sparse_dim() != 1:
            raise InputError(
                "a gradient must be dense, or sparse by rows (one sparse dimension), got layout "
                f"{gradient.layout} for {slot.label}: make it dense with to_dense()."
            )
        slot.parameter.grad = gradient.coalesce()
    return present


def refuse_sparse(slots: Sequence[Slot], name: str, cure: str) -> None:
    """Raise if a gradient is sparse, for a transform that would make it dense.

    Raises:
        InputError: One is sparse.
    """
    for slot in slots:
        if slot.rows is not None:
            raise InputError(
                f"{name} must have dense gradients, since it changes every element, got a sparse "
                f"one for {slot.label}: {cure}."
            )


def labels(slots: Sequence[Slot]) -> str:
    """Labels of the slots, the first few of them."""
    shown = [slot.label for slot in slots[:_MAX_LABELS]]
    return "; ".join([*shown, "…"] if len(slots) > _MAX_LABELS else shown)


def batches(*columns: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Aligned lists of tensors, each list of one device and dtype and of bounded size.

    Large tensors are split along their first axis, so that temporary copies stay small. The
    pieces are views: changing them in place changes the tensors.

    Args:
        columns: lists of equal length; the tensors at one index have equal first axes.
    """
    # torch computes the norm of many tensors at once only for lists of one device and dtype.
    for rows in by_kind(zip(*columns, strict=True)):
        max_size = _max_size(rows[0][0])
        for batch in _pack((piece for row in rows for piece in split_large(*row)), max_size):
            yield tuple(list(column) for column in zip(*batch, strict=True))


def by_kind(rows: Iterable[tuple[Any, ...]]) -> Iterable[list[tuple[Any, ...]]]:
    """Group tuples by the device and dtype of their first items, which are tensors."""
    kinds: dict[object, list[tuple[Any, ...]]] = {}
    for row in rows:
        kinds.setdefault((row[0].device, row[0].dtype), []).append(row)
    return kinds.values()


def split_large(*row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of one length along their first axis, if the first of them is large."""
    first, max_size = row[0], _max_size(row[0])
    if first.numel() <= max_size:
        return iter([row])
    length = max(1, max_size * first.shape[0] // first.numel())
    return zip(*(torch.split(tensor, length) for tensor in row), strict=True)


def reduction_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype in which to reduce a tensor: float32 for float16 and bfloat16, else its own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def select(slots: Sequence[Slot], where: Callable[[Tensor], bool] | None) -> list[Slot]:
    """Slots whose parameter satisfies `where`."""
    return [slot for slot in slots if where is None or where(slot.parameter)]


def _max_size(tensor: Tensor) -> int:
    return _CPU_BATCH_SIZE if tensor.device.type == "cpu" else _DEVICE_BATCH_SIZE


def _pack(
    pieces: Iterator[tuple[Tensor, ...]], max_size: int
) -> Iterator[list[tuple[Tensor, ...]]]:
    """Group pieces, in order, into batches of at most `max_size` elements of their first tensor."""
    batch: list[tuple[Tensor, ...]] = []
    size = 0
    for piece in pieces:
        if batch and size + piece[0].numel() > max_size:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece[0].numel()
    yield batch


Schedule: TypeAlias = Callable[[int], float]
Where: TypeAlias = Callable[[Tensor], bool]


@dataclass(frozen=True, kw_only=True)
class Transform(ABC):
    """Changes gradients, or shrinks weights, before an optimizer steps.

    The functions of this package build transforms; a subclass with its own `apply` is one too.

    Attributes:
        name: Its name in messages and in the optimizer's `state_dict`.
        where: Selects the parameters, called with each; None: all of them.
    """

    name: str
    where: Where | None = None

    def __post_init__(self) -> None:
        if self.where is not None and not callable(self.where):
            raise SpecError(
                f"where must be a function of a parameter, got {self.where!r} ({self.name}): "
                "write for example where=lambda p: p.ndim > 1."
            )

    def check(self, optimizer: Optimizer) -> None:
        """Check, when it is attached, that it can work on this optimizer.

        Raises:
            SpecError: it cannot.
        """
        slots = slots_of(optimizer)
        if not select(slots, self.where):
            raise SpecError(
                f"where must choose a parameter, got none ({self.name}); there are: "
                f"{labels(slots)}."
            )

    @abstractmethod
    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:
        """Change the gradients in place.

        Args:
            slots: The selected parameters that have gradients.
            step: The number of steps the optimizer has made.
            first: False when a closure is evaluated again within one step.
        """


@dataclass(frozen=True)
class Strength:
    """A number >= 0, or a schedule `step -> float` of such numbers.

    Attributes:
        label: Its name in messages.
        given: The number or the schedule.
        above_zero: Whether 0 is not allowed.
    """

    label: str
    given: float | Schedule
    above_zero: bool = False

    def __post_init__(self) -> None:
        if not callable(self.given):
            self._checked(self.given, "")

    def at(self, step: int) -> float:
        """The number at `step`.

        Raises:
            SpecError: the schedule returns a number that is not allowed.
        """
        if not callable(self.given):
            return float(self.given)
        return self._checked(self.given(step), f" at step {step}")

    def _checked(self, value: float, when: str) -> float:
        rule = "> 0" if self.above_zero else ">= 0"
        if not is_finite(value) or value < 0 or (self.above_zero and value == 0):
            raise SpecError(
                f"{self.label} must be a finite number {rule}, or a schedule that gives such, "
                f"got {value!r}{when}."
            )
        return float(value)
