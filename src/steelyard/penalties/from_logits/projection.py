"""`Projection`: hidden states and an output layer in place of logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from steelyard.penalties._arrays import Array, is_sharded


@dataclass(frozen=True, eq=False)
class Projection:
    """Hidden states and an output layer, whose logits are `hidden @ weight.T + bias`.

    The functions of this package take it in place of logits and of a reference (torch). They
    compute one chunk of rows at a time, so that at most one chunk's logits exist.

    Attributes:
        hidden: Any leading shape, features last.
        weight: `[classes, features]`, as in `torch.nn.Linear`, of the same dtype.
        bias: `[classes]`, or None.
        chunk: Rows at a time; `None` is as many as fit into 1 GB of bfloat16 logits on a GPU.

    Example:
        >>> import torch
        >>> from steelyard.penalties.from_logits import entropy
        >>> weight = torch.zeros(4, 3)
        >>> projection = Projection(torch.randn(2, 5, 3, requires_grad=True), weight)
        >>> projection.shape, projection[:, 1:].shape
        ((2, 5, 4), (2, 4, 4))
        >>> print(f"{entropy(projection):.4f} {entropy(projection.logits()):.4f}")
        1.3863 1.3863
    """

    hidden: Array
    weight: Array
    bias: Array | None = None
    chunk: int | None = field(default=None, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits."""
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    def logits(self) -> Array:
        """Compute all logits."""
        logits = self.hidden @ self.weight.T
        return logits if self.bias is None else logits + self.bias

    def gathered(self) -> Projection:
        """Projection with the whole output layer, if each process has a part of it, as under FSDP.

        Rows are this process's own, so that the gradient of the layer is averaged over the
        processes, as FSDP does it. A collective operation: every process must call it.
        """
        if not is_sharded(self.weight):
            return self
        bias = None if self.bias is None else _gathered(self.bias)
        return replace(self, weight=_gathered(self.weight), bias=bias)

    def __getitem__(self, at: Any) -> Projection:  # whatever the hidden states take
        """Projection of some of the rows: an index, a slice or a mask of the leading axes."""
        return replace(self, hidden=self.hidden[at])

    def __iter__(self) -> Iterator[Projection]:
        """Projections of each entry of the first axis."""
        return (replace(self, hidden=each) for each in self.hidden)


def _gathered(part: Array) -> Array:
    from torch.distributed.tensor import Partial, Replicate  # noqa: PLC0415  # loaded: it is one

    mesh = part.device_mesh
    whole = part.redistribute(placements=[Replicate()] * mesh.ndim)
    return whole.to_local(grad_placements=[Partial("avg")] * mesh.ndim)


def materialize(logits: Array | Projection | None) -> Array | None:
    """Logits as an array: of a projection, all of them, as constants."""
    if not isinstance(logits, Projection):
        return logits
    logits = logits.gathered()
    bias = None if logits.bias is None else logits.bias.detach()
    return Projection(logits.hidden.detach(), logits.weight.detach(), bias).logits()
