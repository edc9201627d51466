"""Arguments that travel: the floats that a gradient goes to on one side, the rest on the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Slot:
    """Where a float tensor was: its place in the list, and its dtype."""

    index: int
    dtype: torch.dtype


def without_floats(value: Any, *, away: bool = False) -> tuple[Any, list[Tensor]]:
    """`value` with a slot for each tensor in it that requires a gradient, and these tensors.

    Args:
        value: tensors in lists, tuples, mappings and dataclasses, with anything else between.
        away: whether the rest goes to another process, which has the CPU alone.
    """
    floats: dict[int, Tensor] = {}

    def kept(tensor: Tensor) -> Any:
        if tensor.requires_grad and torch.is_grad_enabled():
            floats.setdefault(id(tensor), tensor)
            return _Slot(list(floats).index(id(tensor)), tensor.dtype)
        return tensor.detach().cpu() if away else tensor.detach()

    return _mapped(value, Tensor, kept), list(floats.values())


def with_floats(value: Any, floats: Sequence[Tensor]) -> Any:
    """The inverse: each tensor is what it was."""
    return _mapped(value, _Slot, lambda slot: floats[slot.index].to(slot.dtype))


def with_precise_floats(value: Any, floats: Sequence[Tensor]) -> Any:
    """The inverse, with every float in the dtype of `floats`: differences need their digits."""
    dtype = floats[0].dtype
    alike = _mapped(value, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
    return _mapped(alike, _Slot, lambda slot: floats[slot.index])


def _mapped(value: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """`value` with `fn` of everything in it that is of a kind, in containers of the same types."""
    if isinstance(value, kind):
        return fn(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(
            value, **{name: _mapped(getattr(value, name), kind, fn) for name in fields}
        )
    if isinstance(value, Mapping):
        return {name: _mapped(inner, kind, fn) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        items = [_mapped(inner, kind, fn) for inner in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@dataclass(frozen=True)
class Unpack:
    """A function over named inputs, called as a term of a pipeline is.

    Attributes:
        fn: the function.
        fill: how the floats come back into its arguments.
    """

    fn: Callable[..., Any]
    fill: Callable[[Any, Sequence[Tensor]], Any] = with_floats

    def __call__(self, data: Any, logprobs: Sequence[Tensor], **options: Any) -> Any:
        """What the function gives for the arguments whose floats are `logprobs`."""
        positional, extra = self.fill(data, logprobs)
        return self.fn(*positional, **{**extra, **options})


class AsyncUnpack(Unpack):
    """The same for an async function."""

    async def __call__(self, data: Any, logprobs: Sequence[Tensor], **options: Any) -> Any:
        """What the function gives for the arguments whose floats are `logprobs`."""
        return await super().__call__(data, logprobs, **options)
