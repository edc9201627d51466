"""Protocol of terms that can be computed together (fused), and their common result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor

from steelyard.gradients.layout import LogProbs


@dataclass(frozen=True, eq=False)
class Joint:
    """Result of several fused terms.

    Attributes:
        values: the unweighted value of each term, scalar tensors.
        total: their weighted sum, with a graph to their inputs.
        norms: the L2 norm of each term's gradient; empty unless tracked.
        cosines: of each pair of terms, by their indices; empty unless tracked.
        total_norm: the norm of the gradient of `total`, if it is known.
    """

    values: Sequence[Tensor]
    total: Tensor
    norms: Sequence[float] = ()
    cosines: Mapping[tuple[int, int], float] = field(default_factory=dict)
    total_norm: float | None = None


@runtime_checkable
class Fusable(Protocol):
    """A regularizer that can be computed together with others, faster than one by one.

    It returns a loss without metrics, and reads only the shape of the log-probs.
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
    ) -> Joint | None:
        """Compute it and `others` at once; None if the batch has nothing that they measure.

        Args:
            others: regularizers that it fuses with.
            weights: its own first, then theirs.
            data: as for `compute`.
            logprobs: as for `compute`.
            tracked: whether to compute norms and cosines.
            needed: the extra inputs that they need, the same for all.
        """
