"""The shape of the log-probs, and one flat vector that holds them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from steelyard.errors import InputError

LogProbs: TypeAlias = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Layout:
    """How a flat vector divides into the log-probs of each datum, in the caller's structure."""

    kind: Literal["tensor", "list", "tuple"]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each datum."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @cached_property
    def _reshaped(self) -> bool:
        return any(len(shape) != 1 for shape in self.shapes)

    def split(self, flat: Tensor) -> LogProbs:
        """Views of `flat` in the caller's structure.

        `torch.split` makes all views with one autograd node, so that the gradient of any term
        with respect to all log-probs comes back as one vector.
        """
        views: Sequence[Tensor] = torch.split(flat, self.sizes)
        if self._reshaped:
            views = [view.view(shape) for view, shape in zip(views, self.shapes, strict=True)]
        if self.kind == "tensor":
            return views[0]
        return list(views) if self.kind == "list" else tuple(views)


def flatten(logprobs: LogProbs) -> tuple[Layout, Tensor]:
    """The layout of `logprobs`, and one detached vector of all their elements.

    Raises:
        InputError: they are not floating-point tensors of one dtype and device, or there are none.
    """
    if isinstance(logprobs, Tensor):
        _check(logprobs, logprobs, "logprobs")
        return Layout("tensor", (tuple(logprobs.shape),)), logprobs.detach().reshape(-1)
    if not isinstance(logprobs, list | tuple) or not logprobs:
        got = f"an empty {type(logprobs).__name__}" if logprobs in ([], ()) else repr(logprobs)
        raise InputError(
            f"logprobs must be a torch tensor or a list of them, one per datum, got {got}."
        )
    for index, tensor in enumerate(logprobs):
        _check(tensor, logprobs[0], f"logprobs[{index}]")
    layout = Layout(
        "list" if isinstance(logprobs, list) else "tuple", tuple(tuple(t.shape) for t in logprobs)
    )
    return layout, torch.cat([tensor.detach().reshape(-1) for tensor in logprobs])


def _check(tensor: Tensor, first: Tensor, where: str) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{where} must be a floating-point torch tensor, got {got}.")
    if tensor.dtype != first.dtype or tensor.device != first.device:
        raise InputError(
            f"all logprobs must have one dtype and device, got {tensor.dtype} on {tensor.device} "
            f"at {where} beside {first.dtype} on {first.device}."
        )
