"""Base losses that config files can name: cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from steelyard.composition import PerDatum
from steelyard.errors import InputError, SpecError
from steelyard.gradients import LogProbs, as_tensor, loss_fn_input


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Cross-entropy of the target tokens, with Tinker's definition: `-sum(logprobs * weights)`.

    Reads from each datum: `weights` (optional, `[T]`; all 1 if missing).

    Args:
        reduction: `"sum"`, or `"mean"`, which divides by the sum of all weights.

    Raises:
        SpecError: `reduction` is neither.

    Example:
        >>> data = [{"loss_fn_inputs": {"weights": [0.0, 1.0, 1.0]}}]
        >>> logprobs = [torch.tensor([-9.0, -1.0, -2.0])]
        >>> loss, metrics = CrossEntropy().compute(data, logprobs)
        >>> loss, metrics["nll"]
        (tensor(3.), 1.5)
    """

    reduction: Literal["sum", "mean"] = "sum"
    name: ClassVar[str] = "cross_entropy"

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "mean"):
            raise SpecError(f"reduction must be 'sum' or 'mean', got {self.reduction!r}.")

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]]:
        """Loss of a batch; metrics: `nll` per weighted token, and `tokens`, the sum of weights."""
        rows = [logprobs] if isinstance(logprobs, Tensor) else list(logprobs)
        weights = [_weights(datum, row) for datum, row in zip(data, rows, strict=True)]
        total = -torch.stack([(row * w).sum() for row, w in zip(rows, weights, strict=True)]).sum()
        tokens = sum(w.sum().item() for w in weights)
        mean = total / max(tokens, 1e-12)  # 0 rather than NaN where every weight is 0
        metrics = {"nll": mean.item(), "tokens": tokens}
        return (total if self.reduction == "sum" else mean), metrics

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`."""
        pairs = zip(data, shapes, strict=True)
        weights = [_weights(datum, torch.zeros(shape)) for datum, shape in pairs]
        tokens = sum(each.sum().item() for each in weights)
        mean = max(tokens, 1e-12)
        return PerDatum(
            _negative_logprobs,
            {"weights": weights},
            "sum" if self.reduction == "sum" else mean,
            metrics={"nll": (_negative_logprobs, mean), "tokens": tokens},
            all_tokens=True,
        )


def _negative_logprobs(logprobs: Tensor, weights: Tensor) -> Tensor:
    return -logprobs * weights


def _weights(datum: Any, logprobs: Tensor) -> Tensor:
    given = loss_fn_input(datum, "weights")
    if given is None:
        return torch.ones_like(logprobs)
    weights = as_tensor(given).to(logprobs)
    if weights.shape != logprobs.shape:
        raise InputError(
            f"weights must have the shape of the log-probs, {list(logprobs.shape)}, "
            f"got {list(weights.shape)}."
        )
    return weights
