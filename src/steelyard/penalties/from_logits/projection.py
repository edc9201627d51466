"""`Projection`: a value that stands for logits and does not make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from steelyard.penalties._arrays import Array


@dataclass(frozen=True, eq=False)
class Projection:
    """Hidden states and the output layer that makes logits of them: `hidden @ weight.T + bias`.

    The functions of this package take it in the place of logits and of a reference (torch), and
    go over it a chunk of rows at a time: there are never more than one chunk's logits.

    Attributes:
        hidden: Any leading shape, features last.
        weight: `[classes, features]`, as in `torch.nn.Linear`, of the same dtype.
        bias: `[classes]`, or None.
        chunk: Rows at a time; `None` is as many as have 1 GB of bfloat16 logits on a GPU.

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
        """The shape that the logits would have."""
        return (*self.hidden.shape[:-1], self.weight.shape[0])

    def logits(self) -> Array:
        """Make the logits, all of them."""
        made = self.hidden @ self.weight.T
        return made if self.bias is None else made + self.bias

    def __getitem__(self, at: Any) -> Projection:  # whatever the hidden states take
        """The same for some of the rows: an index, a slice or a mask of the leading axes."""
        return replace(self, hidden=self.hidden[at])

    def __iter__(self) -> Iterator[Projection]:
        """One for each entry of the first axis."""
        return (replace(self, hidden=each) for each in self.hidden)


def made(logits: Array | Projection | None) -> Array | None:
    """Logits as an array, where something else exists as a whole anyway; constants."""
    if not isinstance(logits, Projection):
        return logits
    bias = None if logits.bias is None else logits.bias.detach()
    return Projection(logits.hidden.detach(), logits.weight.detach(), bias).logits()
