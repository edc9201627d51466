"""Base losses that config files can name: cross-entropy, and losses over advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from steelyard.composition.named_losses import NamedBaseLoss, find_loss, named_fields
from steelyard.composition.per_datum import PerDatum
from steelyard.errors import InputError, SpecError
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input
from steelyard.gradients.layout import LogProbs


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Cross-entropy of the target tokens, `-sum(logprobs * weights) / sum(weights)`.

    Reads from each datum: `weights` (optional, `[T]`; all 1 if missing).

    Args:
        reduction: `"mean"`, or `"sum"`, Tinker's definition, which is not divided by the weights.

    Raises:
        SpecError: `reduction` is neither.

    Example:
        >>> data = [{"loss_fn_inputs": {"weights": [0.0, 1.0, 1.0]}}]
        >>> logprobs = [torch.tensor([-9.0, -1.0, -2.0])]
        >>> loss, metrics = CrossEntropy().compute(data, logprobs)
        >>> loss, metrics["nll"]
        (tensor(1.5000), 1.5)
    """

    reduction: Literal["mean", "sum"] = "mean"
    name: ClassVar[str] = "cross_entropy"

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)

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
        tokens = sum(row.sum().item() for row in weights)
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


@dataclass(frozen=True)
class PolicyLoss(NamedBaseLoss):
    """A loss over advantages that Tinker knows by name, with metrics of the ratio.

    Reads from each datum: `logprobs` (when the tokens were sampled) and `advantages`, both `[T]`;
    `weights` (optional, `[T]`), where 0 leaves a token out of the metrics and of the mean.

    Attributes:
        reduction: `"mean"` over the tokens that count, or `"sum"`, Tinker's definition.

    Example:
        >>> data = [{"loss_fn_inputs": {"logprobs": [-1.0, -2.0], "advantages": [1.0, 1.0]}}]
        >>> loss, metrics = PolicyLoss.of("ppo", {}).compute(data, [torch.tensor([-0.5, -2.0])])
        >>> round(loss.item(), 4), metrics["clip_fraction"]
        (-1.1, 0.5)
    """

    reduction: Literal["mean", "sum"] = "mean"

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any] | None = None) -> Self:
        """Build it from its name and its settings: those of Tinker, and `reduction`.

        Raises:
            SpecError: a setting is unknown or invalid.
        """
        settings = dict(config or {})
        reduction = _check_reduction(settings.pop("reduction", "mean"))
        try:
            loss, complete = find_loss(name, settings, argument="options")
        except InputError as error:
            raise SpecError(str(error)) from error
        return cls(loss, complete, reduction=reduction)

    def compute(  # type: ignore[override]  # with metrics
        self, data: Any, logprobs: LogProbs
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of a batch, and metrics over the tokens that count.

        `ratio`, the mean of p/q, with q when the tokens were sampled; `clip_fraction`, the fraction
        of tokens whose ratio is outside the clipping bounds, for a loss that has them; `tokens`,
        their number.
        """
        rows = [logprobs] if isinstance(logprobs, Tensor) else list(logprobs)
        total = super().compute(data, rows)
        shapes = [row.shape for row in rows]
        kept = torch.cat([row.reshape(-1) for row in _counted(data, shapes)])
        tokens = max(int(kept.sum()), 1)
        with torch.no_grad():
            ratios = self.by_row(data, rows, self._ratio)
            ratio = torch.cat([row.reshape(-1) for row in ratios])[kept]
            metrics = {"ratio": ratio.sum().item() / tokens, "tokens": float(kept.sum())}
            if "clip_low_threshold" in self.settings:
                metrics["clip_fraction"] = self._is_clipped(ratio).sum().item() / tokens
        return total / (self.denominator(data, shapes) or 1.0), metrics

    def denominator(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> float | None:
        """Number of the tokens that count, at least 1; None if the loss is the sum."""
        if self.reduction == "sum":
            return None
        return max(float(sum(int(row.sum()) for row in _counted(data, shapes))), 1.0)

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`."""
        form = super().per_datum(data, shapes)
        kept = [row.float() for row in _counted(data, shapes)]
        counted = sum(row.sum().item() for row in kept)
        tokens = max(int(counted), 1)
        metrics: dict[str, Any] = {"ratio": (self._ratios, tokens), "tokens": counted}
        if "clip_low_threshold" in self.settings:
            metrics["clip_fraction"] = (self._clipped, tokens)
        return replace(
            form,
            values=self._losses,
            fields={**form.fields, "kept": kept},
            reduction=self.denominator(data, shapes) or "sum",
            metrics=metrics,
        )

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.reduction))

    def _losses(self, logprobs: Tensor, kept: Tensor, **fields: Tensor) -> Tensor:  # noqa: ARG002 - of the metrics
        return self._elementwise(logprobs, **fields)

    def _ratio(self, logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        ratio = self.loss.ratio
        assert ratio is not None  # noqa: S101 - for mypy: these losses have one
        return ratio(logprobs, fields)

    def _is_clipped(self, ratio: Tensor) -> Tensor:
        low, high = (self.settings[f"clip_{end}_threshold"] for end in ("low", "high"))
        return (ratio < low) | (ratio > high)

    def _ratios(self, logprobs: Tensor, kept: Tensor, **fields: Tensor) -> Tensor:
        return self._ratio(logprobs, named_fields(fields)) * kept

    def _clipped(self, logprobs: Tensor, kept: Tensor, **fields: Tensor) -> Tensor:
        return self._is_clipped(self._ratio(logprobs, named_fields(fields))).float() * kept


def _counted(data: Sequence[Any], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Whether each token counts, by datum."""
    return [
        _weights(datum, torch.zeros(shape)) != 0 for datum, shape in zip(data, shapes, strict=True)
    ]


def _check_reduction(reduction: Any) -> Literal["mean", "sum"]:
    if reduction not in ("mean", "sum"):
        raise SpecError(f"reduction must be 'mean' or 'sum', got {reduction!r}.")
    checked: Literal["mean", "sum"] = reduction
    return checked


def _weights(datum: Any, logprobs: Tensor) -> Tensor:
    field = loss_fn_input(datum, "weights")
    if field is None:
        return torch.ones_like(logprobs)
    weights = as_tensor(field).to(logprobs)
    if weights.shape != logprobs.shape:
        raise InputError(
            f"weights must have the shape of the log-probs, {list(logprobs.shape)}, "
            f"got {list(weights.shape)}."
        )
    return weights
