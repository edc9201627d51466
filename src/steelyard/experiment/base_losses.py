"""Base losses that config files can name: cross-entropy, and losses over advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from steelyard.composition import NamedBaseLoss, PerDatum, find_loss
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


@dataclass(frozen=True)
class PolicyLoss(NamedBaseLoss):
    """A loss over advantages that Tinker knows by name, with metrics of the ratio.

    Reads from each datum: `logprobs` (when the tokens were sampled) and `advantages`, both `[T]`;
    `weights` (optional, `[T]`), where 0 leaves a token out of the metrics and of the mean.

    Attributes:
        reduction: `"sum"`, as Tinker, or `"mean"`, which divides by the number of tokens.

    Example:
        >>> data = [{"loss_fn_inputs": {"logprobs": [-1.0, -2.0], "advantages": [1.0, 1.0]}}]
        >>> loss, metrics = PolicyLoss.of("ppo", {}).compute(data, [torch.tensor([-0.5, -2.0])])
        >>> round(loss.item(), 4), metrics["clip_fraction"]
        (-2.2, 0.5)
    """

    reduction: Literal["sum", "mean"] = "sum"

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any] | None = None) -> Self:
        """Build it from its name and its settings: those of Tinker, and `reduction`.

        Raises:
            SpecError: a setting is unknown or invalid.
        """
        settings = dict(config or {})
        reduction = _check_reduction(settings.pop("reduction", "sum"))
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
        of tokens whose ratio is outside the clipping bounds, for a loss that has them.
        """
        rows = [logprobs] if isinstance(logprobs, Tensor) else list(logprobs)
        total = super().compute(data, rows)
        kept = torch.cat([_weights(d, row).reshape(-1) for d, row in zip(data, rows, strict=True)])
        kept = kept != 0
        tokens = max(int(kept.sum()), 1)
        with torch.no_grad():
            now = torch.cat([row.reshape(-1) for row in rows])
            sampled = [as_tensor(loss_fn_input(datum, "logprobs")) for datum in data]
            then = torch.cat([row.reshape(-1) for row in sampled]).to(now)
            ratio = (now - then).exp()[kept]
            metrics = {"ratio": ratio.sum().item() / tokens}
            if "clip_low_threshold" in self.settings:
                low, high = (self.settings[f"clip_{end}_threshold"] for end in ("low", "high"))
                outside = (ratio < low) | (ratio > high)
                metrics["clip_fraction"] = outside.sum().item() / tokens
        return (total if self.reduction == "sum" else total / tokens), metrics

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`."""
        form = super().per_datum(data, shapes)
        pairs = zip(data, shapes, strict=True)
        kept = [(_weights(datum, torch.zeros(shape)) != 0).float() for datum, shape in pairs]
        tokens = max(int(sum(each.sum().item() for each in kept)), 1)
        metrics: dict[str, Any] = {"ratio": (self._ratios, tokens)}
        if "clip_low_threshold" in self.settings:
            metrics["clip_fraction"] = (self._clipped, tokens)
        return replace(
            form,
            values=self._losses,
            fields={**form.fields, "kept": kept},
            reduction="sum" if self.reduction == "sum" else tokens,
            metrics=metrics,
        )

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.reduction))

    def _losses(self, logprobs: Tensor, kept: Tensor, **fields: Tensor) -> Tensor:  # noqa: ARG002 - of the metrics
        return self._elementwise(logprobs, **fields)

    def _ratios(self, logprobs: Tensor, kept: Tensor, **fields: Tensor) -> Tensor:
        return (logprobs - fields["field_logprobs"]).exp() * kept

    def _clipped(self, logprobs: Tensor, kept: Tensor, **fields: Tensor) -> Tensor:
        low, high = (self.settings[f"clip_{end}_threshold"] for end in ("low", "high"))
        ratio = (logprobs - fields["field_logprobs"]).exp()
        return ((ratio < low) | (ratio > high)).float() * kept


POLICY_LOSSES = ("importance_sampling", "ppo", "cispo", "dro")


def _check_reduction(reduction: Any) -> Literal["sum", "mean"]:
    if reduction not in ("sum", "mean"):
        raise SpecError(f"reduction must be 'sum' or 'mean', got {reduction!r}.")
    checked: Literal["sum", "mean"] = reduction
    return checked


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
