"""Preference: DPO as a base loss, and the terms that steady it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from steelyard.gradients import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._pairs import pairs_of
from steelyard.regularizers._tokens import DatumRow, Source, mean, rows_of
from steelyard.regularizers.reference import REFERENCE


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Direct preference optimisation, a base loss over pairs of a chosen and a rejected datum.

    `-mean((1 - s) · log sigmoid(h) + s · log sigmoid(-h))` over pairs, with
    `h = β · (Δ_chosen - Δ_rejected)`, where Δ is the sum over a datum's tokens of log p - log r,
    r the reference, and s the label smoothing.

    The gradient is exact.

    Reads from each datum: the reference, of the shape of its log-probs `[T]`; `weights`
    (optional), where 0 leaves a token out; `pair`, if that is a field.

    Args:
        beta: β > 0.
        reference: the field of `loss_fn_inputs` with the reference's log-probs, or a function
            `(datum, index)` that gives them.
        label_smoothing: the share s of labels that may be wrong, in [0, 0.5).
        pair: a field, or a function `(datum, index)`, that gives both data of a pair the same
            label; None: neighbours are pairs. The first of a pair is the chosen one.

    Raises:
        SpecError: an option breaks its rule.

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

    def __post_init__(self) -> None:
        _options.positive("beta", self.beta, self.name)
        _options.settle_source(self, "reference")
        _options.settle_source(self, "pair", optional=True)
        smoothing = _options.fraction("label_smoothing", self.label_smoothing, self.name)
        rule = "a number in [0, 0.5)"
        _options.require(smoothing < 0.5, "label_smoothing", rule, smoothing, self.name)  # noqa: PLR2004 - the rule

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]]:
        """The loss of a batch; `accuracy`, `margin` and the rewards of both sides."""
        pairs = pairs_of(rows_of(data, logprobs), self.pair)
        chosen = self.beta * torch.stack([self._log_ratio(first) for first, _ in pairs])
        rejected = self.beta * torch.stack([self._log_ratio(second) for _, second in pairs])
        margins = chosen - rejected
        s = self.label_smoothing
        loss = -((1 - s) * F.logsigmoid(margins) + s * F.logsigmoid(-margins)).mean()
        metrics = {
            "accuracy": (margins > 0).double().mean().item(),
            "margin": margins.mean().item(),
            "chosen_reward": chosen.mean().item(),
            "rejected_reward": rejected.mean().item(),
        }
        return loss, metrics

    def _log_ratio(self, row: DatumRow) -> Tensor:
        return (row.kept - row.read_like(self.reference)).sum()


@dataclass(frozen=True, kw_only=True)
class ChosenNLL:
    """Negative log-likelihood of the chosen data of each pair: keeps DPO from sinking both.

    `-mean log p` over the tokens of all chosen data.

    The gradient is exact.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `pair`, if that is
    a field.

    Args:
        pair: as in `DPO`.

    Raises:
        SpecError: an option breaks its rule.

    Example:
        >>> ChosenNLL().compute([], [torch.tensor([-0.5, -1.5]), torch.tensor([-9.0])])
        tensor(1.)

    References:
        Pang et al. (2024), "Iterative reasoning preference optimization".
    """

    pair: Source | None = None
    name: ClassVar[str] = "chosen_nll"

    def __post_init__(self) -> None:
        _options.settle_source(self, "pair", optional=True)

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor:
        """The penalty of a batch."""
        pairs = pairs_of(rows_of(data, logprobs), self.pair)
        return -mean(torch.cat([first.kept for first, _ in pairs]))


@dataclass(frozen=True, kw_only=True)
class SquaredLogRatio:
    """Mean squared log-ratio to the reference: holds the model near it on all the data.

    `mean (log p - log r)²` over the tokens of all data: twice the k2 of `KLToReference`.

    The gradient is exact.

    Reads from each datum: the reference, of the shape of its log-probs `[T]`; `weights`
    (optional), where 0 leaves a token out.

    Args:
        reference: as in `DPO`.

    Raises:
        SpecError: an option breaks its rule.

    Example:
        >>> data = [{"loss_fn_inputs": {"reference_logprobs": [-1.0, -2.0]}}]
        >>> SquaredLogRatio().compute(data, [torch.tensor([-1.5, -1.0])])
        tensor(0.6250)
    """

    reference: Source = REFERENCE
    name: ClassVar[str] = "squared_log_ratio"

    def __post_init__(self) -> None:
        _options.settle_source(self, "reference")

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor:
        """The penalty of a batch."""
        ratios = [row.kept - row.read_like(self.reference) for row in rows_of(data, logprobs)]
        return mean(torch.cat(ratios).square())
