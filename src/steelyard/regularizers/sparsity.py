"""Sparsity: L1, L2 and elastic net of log-probs, or of probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from steelyard import penalties
from steelyard.composition import PerDatum
from steelyard.errors import InputError
from steelyard.gradients import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import counted_rows

Of: TypeAlias = Literal["logprobs", "probs"]
Reduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class L1:
    """Mean absolute value of log-probs, or of probabilities.

    `R(|x|)` with x = log p, or p with `of="probs"`; R is the mean or the sum over all tokens
    that count, and all classes of `[T, K]`. Of log-probs, which are never above 0, it is the
    negative log-likelihood: added to a loss it makes the listed tokens more likely. Of
    probabilities it makes them less likely.

    The gradient with respect to log p is exact: sign(x), times p for probabilities; divided by
    the number of elements for the mean.

    Reads from each datum: `weights` (optional), where 0 leaves a token out.

    Args:
        of: `"logprobs"` or `"probs"`.
        reduction: `"mean"` or `"sum"`.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> data = [{"loss_fn_inputs": {"weights": [0.0, 1.0, 1.0]}}]
        >>> L1().compute(data, [torch.tensor([-9.0, -1.0, -3.0])])
        (tensor(2.), {'l1_total': 4.0, 'l1_mean': 2.0})
    """

    of: Of = "logprobs"
    reduction: Reduction = "mean"
    name: ClassVar[str] = "l1"

    def __post_init__(self) -> None:
        _check(self.of, self.reduction, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]] | Any:
        """Compute the penalty of a batch; its sum `l1_total` and its mean `l1_mean`."""
        x = _values(data, logprobs, self.of)
        if x is None:
            return None
        value: Tensor = penalties.l1(x, reduction=self.reduction)
        count = x.numel()
        total = value.item() * (count if self.reduction == "mean" else 1)
        return value, {"l1_total": total, "l1_mean": total / count}

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - no fields
        """Form per datum: see `Separable`."""
        values = self._each
        return PerDatum(
            values,
            reduction=self.reduction,
            metrics={"l1_total": (values, "sum"), "l1_mean": (values, "mean")},
        )

    def _each(self, logprobs: Tensor) -> Tensor:
        return _of(logprobs, self.of).abs()


@dataclass(frozen=True, kw_only=True)
class L2:
    """Mean square of log-probs, or of probabilities.

    `R(clamp(x - c, ±clip)²)` with x = log p, or p with `of="probs"`; R is the mean or the sum
    over all tokens that count, and all classes of `[T, K]`. Of log-probs it raises the least
    likely tokens most; with `center="mean"` it reduces their variance.

    The gradient is exact: that of the formula, 0 where `clip` is exceeded.

    Reads from each datum: `weights` (optional), where 0 leaves a token out.

    Args:
        of: `"logprobs"` or `"probs"`.
        reduction: `"mean"` or `"sum"`.
        clip: the distance from the centre to which larger ones are clamped; None: no limit.
        center: c: None for 0, `"mean"` for the mean over the batch, which is differentiated
            too, or a number.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> L2(center="mean").compute([], [torch.tensor([-1.0]), torch.tensor([-3.0])])
        tensor(1.)
    """

    of: Of = "logprobs"
    reduction: Reduction = "mean"
    clip: float | None = None
    center: Literal["mean"] | float | None = None
    name: ClassVar[str] = "l2"

    def __post_init__(self) -> None:
        _check(self.of, self.reduction, self.name)
        if self.clip is not None:
            _options.positive("clip", self.clip, self.name)
        if self.center is not None and self.center != "mean":
            _options.number("center", self.center, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch."""
        x = _values(data, logprobs, self.of)
        if x is None:
            return None
        value: Tensor = penalties.l2(
            x, reduction=self.reduction, clip=self.clip, center=self.center
        )
        return value

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - no fields
        """Form per datum, unless the centre is the mean of the batch: see `Separable`."""
        if self.center == "mean":
            raise InputError("center='mean' is the mean over the tokens of all data.")
        return PerDatum(self._each, reduction=self.reduction)

    def _each(self, logprobs: Tensor) -> Tensor:
        x = _of(logprobs, self.of)
        if isinstance(self.center, float | int):
            x = x - self.center
        return (x if self.clip is None else x.clamp(-self.clip, self.clip)).square()


@dataclass(frozen=True, kw_only=True)
class ElasticNet:
    """Mixture of `L1` and `L2` of log-probs, or of probabilities.

    `r · R(|x|) + (1 - r) · R(x²)` with r the `l1_ratio`, x = log p, or p with `of="probs"`; R
    is the mean or the sum over all tokens that count, and all classes of `[T, K]`.

    The gradient is exact.

    Reads from each datum: `weights` (optional), where 0 leaves a token out.

    Args:
        l1_ratio: the weight r of `L1`, in [0, 1].
        of: `"logprobs"` or `"probs"`.
        reduction: `"mean"` or `"sum"`.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> ElasticNet(l1_ratio=0.25).compute([], [torch.tensor([-2.0])])
        tensor(3.5000)
    """

    l1_ratio: float = 0.5
    of: Of = "logprobs"
    reduction: Reduction = "mean"
    name: ClassVar[str] = "elastic_net"

    def __post_init__(self) -> None:
        _check(self.of, self.reduction, self.name)
        _options.fraction("l1_ratio", self.l1_ratio, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch."""
        x = _values(data, logprobs, self.of)
        if x is None:
            return None
        value: Tensor = penalties.elastic_net(x, reduction=self.reduction, l1_ratio=self.l1_ratio)
        return value

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - no fields
        """Form per datum: see `Separable`."""
        return PerDatum(self._each, reduction=self.reduction)

    def _each(self, logprobs: Tensor) -> Tensor:
        x, ratio = _of(logprobs, self.of), self.l1_ratio
        return ratio * x.abs() + (1 - ratio) * x.square()


def _check(of: str, reduction: str, name: str) -> None:
    _options.one_of("of", of, ("logprobs", "probs"), name)
    _options.one_of("reduction", reduction, ("mean", "sum"), name)


def _values(data: Any, logprobs: LogProbs, of: Of) -> Tensor | None:
    """All unmasked log-probs, or probabilities, of a batch, flattened; None if it has none."""
    rows = counted_rows(data, logprobs, classes=True)
    return _of(torch.cat([row.kept.reshape(-1) for row in rows]), of) if rows else None


def _of(logprobs: Tensor, of: Of) -> Tensor:
    return logprobs.exp() if of == "probs" else logprobs
