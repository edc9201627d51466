"""Tensors nested in lists, tuples, mappings and dataclasses: iterate over them, replace them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor

# A tensor or a container of nests; other objects in them are ignored. A tensor that occurs
# several times counts once.
Nest: TypeAlias = Any


def fields_of(value: object) -> Mapping[str, Any] | None:
    """A mapping or a dataclass as a mapping; None if `value` is neither."""
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def mapped(nest: Nest, fn: Callable[[Any], Any], kind: type = Tensor) -> Nest:
    """Apply `fn` to all objects of a type in a nest, in containers of the same types.

    `fn` is called once for each object, however often it occurs.
    """
    known: dict[int, Any] = {}

    def of(inner: Nest) -> Nest:
        if isinstance(inner, kind):
            if id(inner) not in known:
                known[id(inner)] = fn(inner)
            return known[id(inner)]
        if isinstance(inner, Mapping):
            return {key: of(each) for key, each in inner.items()}
        if isinstance(inner, list | tuple):
            items = [of(each) for each in inner]
            return type(inner)(*items) if hasattr(inner, "_fields") else type(inner)(items)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            # Copied, not constructed: its `__post_init__` might reject the replacement.
            same = copy(inner)
            for each in dataclasses.fields(inner):
                object.__setattr__(same, each.name, of(getattr(inner, each.name)))
            return same
        return inner

    return of(nest)


def device_of(nest: Nest) -> torch.device:
    """The device of the first tensor that is not empty; the CPU if there is none."""
    devices = (tensor.device for tensor in tensors_in(nest) if tensor.numel())
    return next(devices, torch.device("cpu"))


def filled(nest: Nest, values: Iterable[Any]) -> Nest:
    """Replace the tensors of a nest by `values`, in the order of `tensors_in`."""
    each = iter(values)
    return mapped(nest, lambda _: next(each))


def tensors_in(nest: Nest) -> Iterator[Tensor]:
    """Tensors of a nest, in order, each once."""
    found: dict[int, Tensor] = {}
    _collect(nest, found)
    return iter(found.values())


def _collect(nest: Nest, found: dict[int, Tensor]) -> None:
    if isinstance(nest, Tensor):
        found.setdefault(id(nest), nest)
        return
    fields = fields_of(nest)
    for each in nest if isinstance(nest, list | tuple) else (fields or {}).values():
        _collect(each, found)


def leaves_of(nest: Nest) -> Nest:
    """Turn the tensors of a nest into leaves that require a gradient, over the same memory.

    If some of them require a gradient already, the others stay constants.
    """
    some = any(tensor.requires_grad for tensor in tensors_in(nest))
    with torch.inference_mode(mode=False), torch.enable_grad():
        return mapped(nest, lambda t: t.detach().requires_grad_(t.requires_grad or not some))
