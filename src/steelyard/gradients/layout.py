"""Layout of tensors: log-probs of a batch as one flat vector, tensors in nested containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from steelyard.errors import InputError

LogProbs: TypeAlias = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Layout:
    """Division of a flat vector into the log-probs of each datum, in the caller's structure.

    Attributes:
        kind: the structure of the caller: one tensor, or a list or tuple of them.
        sizes: number of elements of each datum.
        shapes: the shape of each datum; None if all are `[T]`.
    """

    kind: Literal["tensor", "list", "tuple"]
    sizes: list[int]
    shapes: list[torch.Size] | None = None

    def split(self, flat: Tensor) -> LogProbs:
        """Views of `flat` in the caller's structure.

        One `split_with_sizes` node makes all views, so that autograd returns the gradient of a
        term with respect to all log-probs as one vector.
        """
        views: Sequence[Tensor] = torch.split_with_sizes(flat, self.sizes)
        if self.shapes is not None:
            views = [view.view(shape) for view, shape in zip(views, self.shapes, strict=True)]
        if self.kind == "tensor":
            return views[0]
        return list(views) if self.kind == "list" else tuple(views)


@dataclass(frozen=True, eq=False)
class SplitOnRead(Mapping[str, LogProbs]):
    """Flat vectors by name, each split into the caller's structure when it is read.

    Attributes:
        layout: their division.
        vectors: `[N]` each.
    """

    layout: Layout
    vectors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> LogProbs:
        return self.layout.split(self.vectors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.vectors)

    def __len__(self) -> int:
        return len(self.vectors)


def flatten(logprobs: LogProbs) -> tuple[Layout, Tensor]:
    """The layout of `logprobs`, and one detached vector of all their elements.

    The vector is a copy, so that later writes to the log-probs do not reach the terms.

    Raises:
        InputError: they are not floating-point tensors of one dtype and device, or there are none.
    """
    if isinstance(logprobs, Tensor):
        kind: Literal["tensor", "list", "tuple"] = "tensor"
        tensors: Sequence[Tensor] = [logprobs]
    elif isinstance(logprobs, list | tuple) and logprobs:
        kind = "list" if isinstance(logprobs, list) else "tuple"
        tensors = logprobs
    else:
        raise InputError(
            f"logprobs must be a torch tensor or a list of them, one per datum, "
            f"got {type(logprobs).__name__} {logprobs!r}."
        )
    # This runs at every step for every datum: diagnose only after something failed.
    try:
        dtypes = {tensor.dtype for tensor in tensors}
        shapes = None
        if not all(tensor.dim() == 1 for tensor in tensors):
            shapes = [tensor.shape for tensor in tensors]
            tensors = [tensor.reshape(-1) for tensor in tensors]
        with torch.no_grad():
            flat = torch.cat(list(tensors))
    except (AttributeError, RuntimeError, TypeError) as error:
        raise _input_error(tensors) from error
    if len(dtypes) > 1 or not flat.is_floating_point():
        raise _input_error(tensors)
    return Layout(kind, [tensor.numel() for tensor in tensors], shapes), flat


@contextmanager
def _enabled() -> Iterator[None]:
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


_AS_IT_IS = nullcontext()


def gradients_enabled() -> AbstractContextManager[None]:
    """Enable gradients, also for a caller in `no_grad` or inference mode."""
    # Entering the two modes takes as long as a small term, and most callers have them already.
    as_it_is = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return _AS_IT_IS if as_it_is else _enabled()


def leaf_over(flat: Tensor) -> Tensor:
    """Leaf tensor over the memory of `flat`, with respect to which terms are differentiated."""
    with gradients_enabled():
        # Cloned only if necessary: tensors made in inference mode cannot require a gradient.
        return (flat.clone() if flat.is_inference() else flat.detach()).requires_grad_()


def _input_error(tensors: Sequence[object]) -> InputError:
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            return InputError(
                f"logprobs[{index}] must be a floating-point torch tensor, got {got}."
            )
    kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors if isinstance(t, Tensor)})
    return InputError(f"all logprobs must have one dtype and device, got {' and '.join(kinds)}.")


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
            return {key: of(value) for key, value in inner.items()}
        if isinstance(inner, list | tuple):
            items = [of(item) for item in inner]
            return type(inner)(*items) if hasattr(inner, "_fields") else type(inner)(items)
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            # Copied, not constructed: its `__post_init__` might reject the replacement.
            same = copy(inner)
            for field in dataclasses.fields(inner):
                object.__setattr__(same, field.name, of(getattr(inner, field.name)))
            return same
        return inner

    return of(nest)


def device_of(nest: Nest) -> torch.device:
    """The device of the first tensor that is not empty; the CPU if there is none."""
    devices = (tensor.device for tensor in tensors_in(nest) if tensor.numel())
    return next(devices, torch.device("cpu"))


def filled(nest: Nest, values: Iterable[Any]) -> Nest:
    """Replace the tensors of a nest by `values`, in the order of `tensors_in`."""
    remaining = iter(values)
    return mapped(nest, lambda _: next(remaining))


def tensors_in(nest: Nest) -> Iterator[Tensor]:
    """Tensors of a nest, in order, each once."""
    tensors: dict[int, Tensor] = {}
    _collect(nest, tensors)
    return iter(tensors.values())


def _collect(nest: Nest, tensors: dict[int, Tensor]) -> None:
    if isinstance(nest, Tensor):
        tensors.setdefault(id(nest), nest)
        return
    fields = fields_of(nest)
    for inner in nest if isinstance(nest, list | tuple) else (fields or {}).values():
        _collect(inner, tensors)


def leaves_of(nest: Nest) -> Nest:
    """Turn the tensors of a nest into leaves that require a gradient, over the same memory.

    If some of them require a gradient already, the others stay constants.
    """
    some = any(tensor.requires_grad for tensor in tensors_in(nest))
    with gradients_enabled():
        return mapped(nest, lambda t: t.detach().requires_grad_(t.requires_grad or not some))
