"""Flatten the log-probs of a batch into one vector, and split such a vector again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

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


def leaf_over(flat: Tensor) -> Tensor:
    """Leaf tensor over the memory of `flat`, with respect to which terms are differentiated."""
    with torch.inference_mode(mode=False), torch.enable_grad():
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
