"""Sparsity: L1, L2 and elastic net of log-probs, or of probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from steelyard import penalties
from steelyard.composition.per_datum import PerDatum
from steelyard.errors import InputError
from steelyard.gradients.layout import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import counted_rows

Of: TypeAlias = Literal["logprobs", "probs"]
Reduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class _Magnitude:
    """Base of the penalties on the magnitude of log-probs, or of probabilities."""

    of: Of = "logprobs"
    reduction: Reduction = "mean"
    name: ClassVar[str]

    def __post_init__(self) -> None:
        _options.one_of("of", self.of, ("logprobs", "probs"), self.name)
        _options.one_of("reduction", self.reduction, ("mean", "sum"), self.name)

    def _token_values(self, logprobs: Tensor) -> Tensor:
        """Penalty of each token of a datum."""
        raise NotImplementedError

    def _numbers(self, logprobs: Tensor) -> Tensor:
        return logprobs.exp() if self.of == "probs" else logprobs

    def _all_numbers(self, data: Any, logprobs: LogProbs) -> Tensor | None:
        """Numbers of all tokens of a batch that count, flattened; None if there are none."""
        rows = counted_rows(data, logprobs, classes=True)
        return self._numbers(torch.cat([row.kept.reshape(-1) for row in rows])) if rows else None


@dataclass(frozen=True, kw_only=True)
class L1(_Magnitude):
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

    name: ClassVar[str] = "l1"

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]] | Any:
        """Compute the penalty of a batch; its sum `l1_total` and its mean `l1_mean`."""
        x = self._all_numbers(data, logprobs)
        if x is None:
            return None
        value: Tensor = penalties.l1(x, reduction=self.reduction)
        count = x.numel()
        total = value.item() * (count if self.reduction == "mean" else 1)
        return value, {"l1_total": total, "l1_mean": total / count}

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - no fields
        """Form per datum: see `Separable`."""
        values = self._token_values
        return PerDatum(
            values,
            reduction=self.reduction,
            metrics={"l1_total": (values, "sum"), "l1_mean": (values, "mean")},
        )

    def _token_values(self, logprobs: Tensor) -> Tensor:
        return self._numbers(logprobs).abs()


@dataclass(frozen=True, kw_only=True)
class L2(_Magnitude):
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

    clip: float | None = None
    center: Literal["mean"] | float | None = None
    name: ClassVar[str] = "l2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None:
            _options.positive("clip", self.clip, self.name)
        if self.center is not None and self.center != "mean":
            _options.number("center", self.center, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch."""
        x = self._all_numbers(data, logprobs)
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
        return PerDatum(self._token_values, reduction=self.reduction)

    def _token_values(self, logprobs: Tensor) -> Tensor:
        x = self._numbers(logprobs)
        if isinstance(self.center, float | int):
            x = x - self.center
        return (x if self.clip is None else x.clamp(-self.clip, self.clip)).square()


@dataclass(frozen=True, kw_only=True)
class ElasticNet(_Magnitude):
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
    name: ClassVar[str] = "elastic_net"

    def __post_init__(self) -> None:
        super().__post_init__()
        _options.fraction("l1_ratio", self.l1_ratio, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch."""
        x = self._all_numbers(data, logprobs)
        if x is None:
            return None
        value: Tensor = penalties.elastic_net(x, reduction=self.reduction, l1_ratio=self.l1_ratio)
        return value

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - no fields
        """Form per datum: see `Separable`."""
        return PerDatum(self._token_values, reduction=self.reduction)

    def _token_values(self, logprobs: Tensor) -> Tensor:
        x, ratio = self._numbers(logprobs), self.l1_ratio
        return ratio * x.abs() + (1 - ratio) * x.square()
