"""Preference optimisation: DPO as a base loss, and two terms that stabilise it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from steelyard.composition.per_datum import PerDatum
from steelyard.errors import InputError
from steelyard.gradients.layout import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import (
    DatumRow,
    Source,
    batch_pairs,
    batch_rows,
    counted_rows,
    rank_of,
)
from steelyard.regularizers.reference import REFERENCE


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimisation: a base loss over pairs of a chosen and a rejected datum.

    `-mean((1 - s) · log sigmoid(h) + s · log sigmoid(-h))` over pairs, with s the label smoothing
    and `h = β · (Δ_chosen - Δ_rejected)`, where `Δ = Σ_t (log p_t - log r_t)` is a sum, not a
    mean, over the tokens of a datum, and r the reference.

    The gradient is exact; without smoothing ∂loss/∂h = -sigmoid(-h) / (number of pairs).

    Reads from each datum: the reference, of the shape of its log-probs `[T]`; `weights`
    (optional), where 0 leaves a token out; `pair`, if that is a field.

    Args:
        beta: β > 0.
        reference: the field of `loss_fn_inputs` with the reference's log-probs, or a function
            `(datum, index)` that gives them.
        label_smoothing: the assumed fraction s of wrong labels, in [0, 0.5).
        pair: a field, or a function `(datum, index)`, that gives both data of a pair the same
            label; None: neighbours are pairs. The first of a pair is the chosen one.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> data = [{"loss_fn_inputs": {"reference_logprobs": [-1.0]}} for _ in range(2)]
        >>> chosen, rejected = torch.tensor([-0.5]), torch.tensor([-1.5])
        >>> loss, metrics = DPO(beta=1.0).compute(data, [chosen, rejected])
        >>> print(f"{loss:.4f} {metrics['accuracy']} {metrics['margin']}")
        0.3133 1.0 1.0

    References:
        Rafailov et al. (2023), "Direct preference optimization"; Mitchell (2023), "A note on
        DPO with noisy preferences" (label smoothing).
    """

    beta: float = 0.1
    reference: Source = REFERENCE
    label_smoothing: float = 0.0
    pair: Source | None = None
    name: ClassVar[str] = "dpo"
    reads_pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _options.positive("beta", self.beta, self.name)
        _options.resolve_source(self, "reference")
        _options.resolve_source(self, "pair", optional=True)
        smoothing = _options.fraction("label_smoothing", self.label_smoothing, self.name)
        rule = "a number in [0, 0.5)"
        _options.require(smoothing < 0.5, "label_smoothing", rule, smoothing, self.name)  # noqa: PLR2004 - the rule

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of a batch; `accuracy`, `margin` and the rewards of both sides."""
        pairs = batch_pairs(batch_rows(data, logprobs), self.pair)
        # Implicit rewards β·Δ, one per pair; their difference is h.
        chosen = self.beta * torch.stack([self._log_ratio(first) for first, _ in pairs])
        rejected = self.beta * torch.stack([self._log_ratio(second) for _, second in pairs])
        margins = chosen - rejected
        s = self.label_smoothing
        # logsigmoid, not log(sigmoid): finite for margins of any size.
        loss = -((1 - s) * F.logsigmoid(margins) + s * F.logsigmoid(-margins)).mean()
        metrics = {
            "accuracy": (margins > 0).double().mean().item(),
            "margin": margins.mean().item(),
            "chosen_reward": chosen.mean().item(),
            "rejected_reward": rejected.mean().item(),
        }
        return loss, metrics

    def _log_ratio(self, row: DatumRow) -> Tensor:
        return (row.kept - row.read_per_token(self.reference)).sum()


@dataclass(frozen=True, kw_only=True)
class ChosenNLL:
    """Negative log-likelihood of the chosen data: keeps DPO from making both data less likely.

    `-mean log p` over the tokens of all chosen data together.

    The gradient is exact.

    Usual weights: 0.1 to 1, beside `DPO`.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `pair`, if that is
    a field.

    Args:
        pair: as in `DPO`.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> ChosenNLL().compute([], [torch.tensor([-0.5, -1.5]), torch.tensor([-9.0])])
        tensor(1.)

    References:
        Pang et al. (2024), "Iterative reasoning preference optimization".
    """

    pair: Source | None = None
    name: ClassVar[str] = "chosen_nll"
    reads_pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _options.resolve_source(self, "pair", optional=True)

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch; None if no token of a chosen datum counts."""
        pairs = batch_pairs(batch_rows(data, logprobs), self.pair)
        chosen = [first.kept for first, _ in pairs if first.counts]
        return -torch.cat(chosen).mean() if chosen else None

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum | None:
        """Form per datum, with the factor 0 for the rejected ones: see `Separable`."""
        rows = batch_rows(data, [torch.zeros(shape) for shape in shapes])
        chosen = {first.index for first, _ in batch_pairs(rows, self.pair)}
        factors = [torch.tensor(float(row.index in chosen)) for row in rows]
        tokens = sum(len(row.kept) for row in rows if row.index in chosen)
        if not tokens:
            return None
        return PerDatum(lambda logprobs, chosen: -logprobs * chosen, {"chosen": factors}, tokens)


@dataclass(frozen=True, kw_only=True)
class SquaredLogRatio:
    """Mean squared log-ratio to the reference: keeps the model near it on all data.

    `mean (log p - log r)²` over the tokens of all data: twice the k2 of `KLToReference`.

    The gradient is exact.

    Usual weights: 0.001, beside `DPO`.

    Reads from each datum: the reference, of the shape of its log-probs `[T]`; `weights`
    (optional), where 0 leaves a token out.

    Args:
        reference: as in `DPO`.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> data = [{"loss_fn_inputs": {"reference_logprobs": [-1.0, -2.0]}}]
        >>> SquaredLogRatio().compute(data, [torch.tensor([-1.5, -1.0])])
        tensor(0.6250)
    """

    reference: Source = REFERENCE
    name: ClassVar[str] = "squared_log_ratio"

    def __post_init__(self) -> None:
        _options.resolve_source(self, "reference")

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch; None if no token counts."""
        rows = counted_rows(data, logprobs)
        if not rows:
            return None
        log_ratios = [row.kept - row.read_per_token(self.reference) for row in rows]
        return torch.cat(log_ratios).square().mean()

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - all from fields
        """Form per datum: see `Separable`."""
        if rank_of(shapes) != 1:
            raise InputError("it reads log-probs [T], got [T, K].")
        return PerDatum(
            lambda logprobs, reference: (logprobs - reference).square(),
            {"reference": self.reference},
        )
