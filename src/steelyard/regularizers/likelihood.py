"""Likelihood of data: the negative log-likelihood as a term beside another base loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from steelyard.composition.per_datum import PerDatum
from steelyard.gradients.layout import LogProbs
from steelyard.regularizers._tokens import batch_rows, counted_rows


@dataclass(frozen=True, kw_only=True)
class NLL:
    """Negative log-likelihood of the data: keeps them likely while the model learns another task.

    `-mean log p` over all tokens that count, of `[T]` log-probs.

    The gradient is exact. It is meant for data of the term's own (`data=` of its spec): examples to
    keep beside a narrow task, or supervised data beside a loss over sampled answers.

    Reads from each datum: `weights` (optional), where 0 leaves a token out.

    Example:
        >>> NLL().compute([], [torch.tensor([-0.5, -1.5]), torch.tensor([-1.0])])
        tensor(1.)
    """

    name: ClassVar[str] = "nll"

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch."""
        rows = counted_rows(data, logprobs)
        return -torch.cat([row.kept for row in rows]).mean() if rows else None

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`."""
        batch_rows(data, [torch.zeros(shape) for shape in shapes])  # checks the shapes
        return PerDatum(torch.neg)
