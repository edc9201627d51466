"""Terms that are computed together: what they offer, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor

from steelyard.gradients.layout import LogProbs


@dataclass(frozen=True, eq=False)
class Joint:
    """The result of several terms computed at once.

    Attributes:
        values: of each term, unweighted, as tensors without axes.
        total: their weighted sum, with a graph to what they read.
        norms: the L2 norm of each term's gradient there; empty unless tracked.
        cosines: of each pair of terms, by their places; empty unless tracked.
        total_norm: the norm of the gradient of `total`, where the terms know it.
    """

    values: Sequence[Tensor]
    total: Tensor
    norms: Sequence[float] = ()
    cosines: Mapping[tuple[int, int], float] = field(default_factory=dict)
    total_norm: float | None = None


@runtime_checkable
class Fusable(Protocol):
    """A regularizer that can be computed together with others, for less than each alone.

    It returns a loss without metrics, and of the log-probs it reads no more than their shape.
    """

    def fuses_with(self, other: object, *, tracked: bool) -> bool:
        """Whether the two can be computed together, with norms and cosines if `tracked`."""

    def compute_together(
        self,
        others: Sequence[Self],
        weights: Sequence[float],
        data: Any,
        logprobs: LogProbs,
        *,
        tracked: bool,
        **needed: Any,
    ) -> Joint:
        """Compute it and `others` at once.

        Args:
            others: regularizers that it fuses with.
            weights: its own first, then theirs.
            data: as for `compute`.
            logprobs: as for `compute`.
            tracked: whether norms and cosines are wanted.
            needed: the extra inputs that they need, the same for all.
        """
