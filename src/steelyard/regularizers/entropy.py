"""Entropy and confidence penalty: from sampled tokens, or from listed classes and their tail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from steelyard import penalties
from steelyard.composition import PerDatum
from steelyard.errors import InputError
from steelyard.gradients import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._class_rows import entropy_rows
from steelyard.regularizers._estimators import (
    datum_ratios,
    entropy_tokens,
    importance_ratios,
    require_samples,
    sampled_confidence,
    sampled_entropy,
    sequence_entropy,
    sequence_entropy_tokens,
    with_tail,
)
from steelyard.regularizers._tokens import DatumRow, Source, batch_rows, mean, rank_of


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """Entropy of the model's predictions, as a penalty (+H) or a bonus (-H).

    `"penalty"` is +H: adding it to a loss lowers entropy. `"bonus"` is -H: adding it raises
    entropy.

    `[T]`: H is estimated from the sampled tokens, `H = -mean log p`, over all tokens of the batch
    that count. **The gradient is an estimator**, that of `-½ mean (log p)²`: if the tokens were
    sampled from the model being trained, its expectation is the gradient of the entropy of each
    token with its context fixed (differentiating -mean log p would give zero there). The entropy of
    whole sequences also changes with the contexts that the model visits, and its gradient may even
    have the other sign: `level="sequence"` estimates that one. On fixed data a bonus makes
    unlikely tokens more likely, and a penalty makes them less likely.

    `importance` is for tokens sampled from q, an older or another model: with w = p/q of each token
    the value is -mean (w log p) and the gradient that of `-½ mean w (log p)²`, w constant. Both are
    unbiased over tokens sampled from q, in the contexts that were sampled; with
    `level="sequence"` w is the product over the token and those before it, and the contexts
    count as if they were sampled from p.

    `[T, K]`: `H = -Σ p log p` over the K classes and one tail class with the remaining mass,
    averaged over tokens; a lower bound of the true entropy. **The gradient is exact.**

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `importance`, if that
    is a field.

    Args:
        mode: `"penalty"` or `"bonus"`.
        temperature: T > 0; other than 1, the distribution is `softmax(log p / T)`. Needs
            `[T, K]`.
        normalize: divide by the log of the number of classes: `vocabulary` if that is given,
            else K + 1.
        vocabulary: the number of classes of the model. `normalize` needs it for `[T]`.
        level: `"token"`, or `"sequence"` for a gradient that also counts how each token changes the
            contexts after it (REINFORCE with the reward-to-go; of higher variance). Needs `[T]`.
        importance: the field of `loss_fn_inputs` with the log-probs log q of the tokens when they
            were sampled (`"logprobs"` in Tinker's RL data), or a function `(datum, index)`; None:
            they were sampled from the model being trained. Needs `[T]`.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> lp = torch.log(torch.tensor([0.5, 0.25])).requires_grad_()
        >>> loss, metrics = Entropy(mode="bonus").compute([], [lp])
        >>> print(f"{loss:.4f} {metrics['entropy']:.4f}")
        -1.0397 1.0397
        >>> loss.backward()
        >>> lp.grad  # log p / 2: descent raises less likely tokens more
        tensor([-0.3466, -0.6931])

    References:
        Williams & Peng (1991), "Function optimization using connectionist reinforcement
        learning algorithms".
    """

    mode: Literal["penalty", "bonus"] = "penalty"
    temperature: float = 1.0
    normalize: bool = False
    vocabulary: int | None = None
    level: Literal["token", "sequence"] = "token"
    importance: Source | None = None
    name: ClassVar[str] = "entropy"

    def __post_init__(self) -> None:
        _options.one_of("mode", self.mode, ("penalty", "bonus"), self.name)
        _options.positive("temperature", self.temperature, self.name)
        _options.flag("normalize", self.normalize, self.name)
        if self.vocabulary is not None:
            _options.whole("vocabulary", self.vocabulary, 2, self.name)
        _options.one_of("level", self.level, ("token", "sequence"), self.name)
        _options.resolve_source(self, "importance", optional=True)

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]]:
        """Compute the penalty of a batch, and its `entropy` in nats (in [0, 1] if normalised).

        With `importance` also the mean `ratio` of its tokens.
        """
        rows = batch_rows(data, logprobs, classes=True)
        metrics = {}
        if rows[0].logprobs.dim() == 1:
            ratios = None
            if self.importance is not None:
                ratios = importance_ratios(rows, self.importance, self.level)
                metrics["ratio"] = mean(ratios).item()
            entropy = self._from_samples([row.kept for row in rows], ratios)
        else:
            require_samples(self.level, self.importance)
            entropy = mean(self._token_entropies(rows))
        return self._sign * entropy, {"entropy": entropy.item(), **metrics}

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - all from fields
        """Form per datum: see `Separable`."""
        if rank_of(shapes) > 1:
            require_samples(self.level, self.importance)
            metrics: dict[str, Any] = {"entropy": (self._row_values, "mean")}
            return PerDatum(
                lambda logprobs: self._sign * self._row_values(logprobs), metrics=metrics
            )
        self._sampled_normaliser()  # checks the options
        metrics = {"entropy": (lambda *a, **f: self._token_values(*a, **f)[0], "mean")}
        if self.importance is not None:
            metrics["ratio"] = (partial(datum_ratios, level=self.level), "mean")
        return PerDatum(
            lambda *a, **f: self._sign * self._token_values(*a, **f)[0],
            {} if self.importance is None else {"sampled": self.importance},
            gradient_of=lambda *a, **f: self._sign * self._token_values(*a, **f)[1],
            metrics=metrics,
        )

    @property
    def _sign(self) -> float:
        return 1.0 if self.mode == "penalty" else -1.0

    def _token_values(
        self, logprobs: Tensor, sampled: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        ratios = None if sampled is None else datum_ratios(logprobs, sampled, self.level)
        tokens = sequence_entropy_tokens if self.level == "sequence" else entropy_tokens
        values, surrogates = tokens(logprobs, ratios)
        scale = self._sampled_normaliser()
        return values / scale, surrogates / scale

    def _row_values(self, logprobs: Tensor) -> Tensor:
        values = entropy_rows(with_tail(logprobs), self.temperature)
        if not self.normalize:
            return values
        if self.vocabulary is None:
            raise InputError(
                "normalize must come with vocabulary=... in a form per datum, which does not know "
                "the number of classes, got vocabulary=None."
            )
        return values / math.log(self.vocabulary)

    def _from_samples(self, kept: list[Tensor], ratios: Tensor | None) -> Tensor:
        if self.level == "sequence":
            sampled = sequence_entropy(kept, ratios)
        else:
            sampled = sampled_entropy(torch.cat(kept), ratios)
        return sampled / self._sampled_normaliser()

    def _sampled_normaliser(self) -> float:
        if self.temperature != 1:
            raise InputError(
                f"temperature must be 1 for log-probs [T], which are no distributions, got "
                f"{self.temperature}: use [T, K] targets."
            )
        if self.normalize and self.vocabulary is None:
            raise InputError(
                "normalize must come with vocabulary=... for log-probs [T], which do not show "
                "the number of classes, got vocabulary=None."
            )
        return math.log(self.vocabulary) if self.normalize and self.vocabulary else 1.0

    def _token_entropies(self, rows: Sequence[DatumRow]) -> Tensor:
        """Entropy of each token of `[T, K]` log-probs, over K classes and their tail: `[N]`."""
        entropies = []
        for row in rows:
            classes = with_tail(row.kept)
            each = penalties.entropy(classes, temperature=self.temperature, reduction="none")
            count = self.vocabulary or classes.shape[-1]
            entropies.append(each / math.log(count) if self.normalize else each)
        return torch.cat(entropies)


@dataclass(frozen=True, kw_only=True)
class ConfidencePenalty:
    """Penalise overconfident predictions: entropy below a threshold Γ.

    `[T, K]`: `mean max(0, Γ - H_t)` over tokens, H_t the entropy of the K classes and their
    tail. **The gradient is exact.** `[T]`: `max(0, Γ - H)` with H = -mean log p over the sampled
    tokens of the batch. **The gradient is an estimator**, not that of this value: each token adds
    that of `½ (log p)²` if the entropy that the other tokens of the batch show is below Γ. If the
    tokens were sampled from the model being trained, its expectation is -∇H, as in `Entropy`, times
    the probability that the other tokens are below Γ; a batch of one token always counts.

    Reads from each datum: `weights` (optional), where 0 leaves a token out.

    Args:
        threshold: Γ in nats, above 0.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> loss, _ = ConfidencePenalty(threshold=0.7).compute([], [torch.tensor([-0.1, -0.3])])
        >>> print(f"{loss:.4f}")
        0.5000

    References:
        Pereyra et al. (2017), "Regularizing neural networks by penalizing confident output
        distributions".
    """

    threshold: float = 1.0
    name: ClassVar[str] = "confidence_penalty"

    def __post_init__(self) -> None:
        _options.positive("threshold", self.threshold, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]]:
        """Compute the penalty of a batch, and its `entropy` in nats."""
        rows = batch_rows(data, logprobs, classes=True)
        if rows[0].logprobs.dim() == 1:
            kept = torch.cat([row.kept for row in rows])
            return sampled_confidence(kept, self.threshold), {"entropy": -mean(kept).item()}
        classes = [with_tail(row.kept) for row in rows]
        entropy = torch.cat([penalties.entropy(each, reduction="none") for each in classes])
        penalty = mean((self.threshold - entropy).clamp_min(0))
        return penalty, {"entropy": mean(entropy).item()}

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - all from fields
        """Form per datum of `[T, K]` log-probs: see `Separable`."""
        if rank_of(shapes) == 1:
            raise InputError(
                "the entropy of log-probs [T] is that of all tokens of the batch together, and "
                "its threshold too: use [T, K] targets."
            )
        return PerDatum(
            lambda logprobs: (self.threshold - entropy_rows(with_tail(logprobs))).clamp_min(0),
            metrics={"entropy": (lambda logprobs: entropy_rows(with_tail(logprobs)), "mean")},
        )
