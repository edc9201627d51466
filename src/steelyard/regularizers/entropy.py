"""Entropy and confidence penalty: from sampled tokens, listed classes, or the whole vocabulary.

The log-prob of a token says something of the entropy of the distribution only if it was drawn from
that distribution. The tokens of fixed data were not: the mean of -log p over them is their NLL, and
a gradient that would raise the entropy of sampled tokens lowers it there. So both terms read the
whole vocabulary where the data are fixed (`needs_for`), or refuse such data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from array_api_compat import torch as xp
from torch import Tensor

from steelyard import penalties
from steelyard.composition.per_datum import PerDatum
from steelyard.errors import InputError
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input, were_sampled
from steelyard.gradients.layout import LogProbs
from steelyard.penalties import from_logits
from steelyard.penalties.divergences import negative_entropy_rows
from steelyard.penalties.from_logits.projection import Projection
from steelyard.regularizers import _options
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
from steelyard.regularizers._tokens import DatumRow, Source, counted_rows, mean, rank_of

# Batches of at most this many logits, 256 MB in float32, are computed from logits: 512 tokens over
# a vocabulary of unknown size, which is taken for one of 2^17.
_LOGITS, _CLASSES = 2**26, 2**17

ValueAndMetrics: TypeAlias = tuple[Tensor, dict[str, float]]


class _EntropyTerm:
    """Base of both terms: selects what the entropy is computed from."""

    def compute(
        self, data: Any, logprobs: LogProbs, *, projection: Any = None, logits: Any = None
    ) -> ValueAndMetrics | Any:
        """Compute the penalty of a batch, and its `entropy` in nats (in [0, 1] if normalised).

        With `importance` also the mean `ratio` of its tokens.

        Args:
            data: of the batch.
            logprobs: of its tokens, `[T]` or `[T, K]`.
            projection: a `Projection` for each datum; then, or with logits, H is exact.
            logits: `[T, V]` for each datum.

        Raises:
            InputError: the data are fixed, and only the log-probs `[T]` of their tokens are given;
                or an option does not go with what is given.
        """
        rows = counted_rows(data, logprobs, classes=True)
        if not rows:
            return None
        outputs = logits if projection is None else projection
        if outputs is not None:
            outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
            return self._from_vocabulary(rows, outputs)
        self._check_sampled(data, rank_of([row.logprobs.shape for row in rows]))
        return self._from_logprobs(rows)

    def compute_sampled(self, data: Any, logprobs: LogProbs) -> ValueAndMetrics | Any:
        """Compute the same of tokens that were sampled, whatever the data say."""
        rows = counted_rows(data, logprobs, classes=True)
        return self._from_logprobs(rows) if rows else None

    def _check_sampled(self, data: Any, rank: int) -> None:
        _require_sampled(data, rank)

    def _from_vocabulary(self, rows: Sequence[DatumRow], outputs: Sequence[Any]) -> ValueAndMetrics:
        """Penalty from the logits or the projection of each datum."""
        raise NotImplementedError

    def _from_logprobs(self, rows: Sequence[DatumRow]) -> ValueAndMetrics:
        """Penalty from the log-probs of sampled tokens or of listed classes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Entropy(_EntropyTerm):
    """Entropy of the model's predictions, as a penalty (+H) or a bonus (-H).

    `"penalty"` is +H: adding it to a loss lowers entropy. `"bonus"` is -H: adding it raises
    entropy.

    `[T]`, tokens that the model sampled (data with sampling log-probs, in the field `logprobs`): H
    is estimated from them, `H = -mean log p`, over all tokens of the batch that count. **The
    gradient is an estimator**, that of `-½ mean (log p)²`: its expectation is the gradient of the
    entropy of each token with its context fixed (differentiating -mean log p would give zero
    there). The entropy of whole sequences also changes with the contexts that the model visits, and
    its gradient may even have the other sign: `level="sequence"` estimates that one.

    `[T]`, fixed data (without that field): H is the mean entropy of the distributions over the
    whole vocabulary in the contexts of the data. **The gradient is exact.** It needs a client that
    gives the projection onto the vocabulary or the logits, as `steelyard.engine` does; with any
    other the term fails. With `needs=("projection",)` in its spec it is computed so for sampled
    tokens too. `compute` without data takes the tokens for sampled ones.

    `importance` is for tokens sampled from q, an older or another model: with w = p/q of each token
    the value is -mean (w log p) and the gradient that of `-½ mean w (log p)²`, w constant. Both are
    unbiased over tokens sampled from q, in the contexts that were sampled; with
    `level="sequence"` w is the product over the token and those before it, and the contexts
    count as if they were sampled from p.

    `[T, K]`: `H = -Σ p log p` over the K classes and one tail class with the remaining mass,
    averaged over tokens; a lower bound of the true entropy. **The gradient is exact.**

    In reinforcement learning a bound, `at_least`, is usual instead of a weight.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `logprobs` (optional),
    which says that its tokens were sampled; `importance`, if that is a field.

    Args:
        mode: `"penalty"` or `"bonus"`.
        temperature: T > 0; other than 1, the distribution is `softmax(log p / T)`. Not for
            `[T]` of sampled tokens.
        normalize: divide by the log of the number of classes: `vocabulary` if that is given,
            else K + 1, or the number of logits.
        vocabulary: the number of classes of the model. `normalize` needs it for sampled tokens.
        level: `"token"`, or `"sequence"` for a gradient that also counts how each token changes the
            contexts after it (REINFORCE with the reward-to-go; of higher variance). Needs `[T]` of
            sampled tokens.
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

    def needs_for(
        self,
        data: Any,
        gives: Collection[str],
        *,
        own: bool = False,  # noqa: ARG002 - the same for those
    ) -> tuple[str, ...]:
        """Need the whole vocabulary for fixed data: see `ChoosesNeeds`."""
        if self.importance is not None or self.level == "sequence":
            return ()
        return _needs_for(data, gives, self.vocabulary)

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`."""
        self._check_sampled(data, rank_of(shapes))
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

    def _check_sampled(self, data: Any, rank: int) -> None:
        if self.importance is None:
            _require_sampled(data, rank, self.level)

    def _from_vocabulary(self, rows: Sequence[DatumRow], outputs: Sequence[Any]) -> ValueAndMetrics:
        require_samples(self.level, self.importance, "logits", "leave needs out of the spec")
        sums = [
            from_logits.entropy(logits, temperature=self.temperature, mask=mask, reduction="sum")
            for logits, mask in _together(rows, outputs)
        ]
        entropy = torch.stack(sums).sum() / sum(len(row.kept) for row in rows)
        if self.normalize:
            entropy = entropy / math.log(self.vocabulary or outputs[0].shape[-1])
        return self._sign * entropy, {"entropy": entropy.item()}

    def _from_logprobs(self, rows: Sequence[DatumRow]) -> ValueAndMetrics:
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

    def _token_values(
        self, logprobs: Tensor, sampled: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        ratios = None if sampled is None else datum_ratios(logprobs, sampled, self.level)
        tokens = sequence_entropy_tokens if self.level == "sequence" else entropy_tokens
        values, surrogates = tokens(logprobs, ratios)
        scale = self._sampled_normaliser()
        return values / scale, surrogates / scale

    def _row_values(self, logprobs: Tensor) -> Tensor:
        values: Tensor = -negative_entropy_rows(xp, with_tail(logprobs), self.temperature, -1)
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
            values = penalties.entropy(classes, temperature=self.temperature, reduction="none")
            count = self.vocabulary or classes.shape[-1]
            entropies.append(values / math.log(count) if self.normalize else values)
        return torch.cat(entropies)


@dataclass(frozen=True, kw_only=True)
class ConfidencePenalty(_EntropyTerm):
    """Penalise overconfident predictions: entropy below a threshold Γ.

    `[T, K]`: `mean max(0, Γ - H_t)` over tokens, H_t the entropy of the K classes and their
    tail. **The gradient is exact.** So it is for `[T]` of fixed data, with H_t the entropy over the
    whole vocabulary: see `Entropy` for what that needs, and for which data are fixed.

    `[T]`, tokens that the model sampled: `max(0, Γ - H)` with H = -mean log p over the tokens of
    the batch. **The gradient is an estimator**, not that of this value: each token adds that of
    `½ (log p)²` if the entropy that the other tokens of the batch show is below Γ. Its expectation
    is -∇H, as in `Entropy`, times the probability that the other tokens are below Γ; a batch of one
    token always counts.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `logprobs` (optional),
    which says that its tokens were sampled.

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

    def needs_for(
        self,
        data: Any,
        gives: Collection[str],
        *,
        own: bool = False,  # noqa: ARG002 - the same for those
    ) -> tuple[str, ...]:
        """Need the whole vocabulary for fixed data: see `ChoosesNeeds`."""
        return _needs_for(data, gives)

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum of `[T, K]` log-probs: see `Separable`."""
        _require_sampled(data, rank_of(shapes))
        if rank_of(shapes) == 1:
            raise InputError(
                "the entropy of log-probs [T] is that of all tokens of the batch together, and "
                "its threshold too: use [T, K] targets."
            )

        def entropies(logprobs: Tensor) -> Tensor:
            values: Tensor = -negative_entropy_rows(xp, with_tail(logprobs), 1.0, -1)
            return values

        return PerDatum(
            lambda logprobs: (self.threshold - entropies(logprobs)).clamp_min(0),
            metrics={"entropy": (entropies, "mean")},
        )

    def _from_vocabulary(self, rows: Sequence[DatumRow], outputs: Sequence[Any]) -> ValueAndMetrics:
        return self._below(
            entropies if mask is None else entropies[mask]
            for logits, mask in _together(rows, outputs)
            for entropies in [from_logits.entropy(logits, mask=mask, reduction="none")]
        )

    def _from_logprobs(self, rows: Sequence[DatumRow]) -> ValueAndMetrics:
        if rows[0].logprobs.dim() == 1:
            kept = torch.cat([row.kept for row in rows])
            return sampled_confidence(kept, self.threshold), {"entropy": -mean(kept).item()}
        return self._below(penalties.entropy(with_tail(row.kept), reduction="none") for row in rows)

    def _below(self, entropies: Iterable[Tensor]) -> ValueAndMetrics:
        """Penalty of the entropies of the tokens of each datum, and their mean."""
        entropy = torch.cat(list(entropies))
        penalty = mean((self.threshold - entropy).clamp_min(0))
        return penalty, {"entropy": mean(entropy).item()}


def _needs_for(data: Any, gives: Collection[str], vocabulary: int | None = None) -> tuple[str, ...]:
    """Extra input that shows the whole vocabulary, for `[T]` of fixed data, if there is one."""
    if not isinstance(data, Sequence):
        return ()
    targets = [loss_fn_input(datum, "target_tokens") for datum in data]
    known = [as_tensor(field) for field in targets if field is not None]
    if any(tokens.dim() > 1 for tokens in known):
        return ()  # [T, K]: distributions already
    with suppress(InputError):  # mixed data: `compute` raises it, as a failure of the term
        if were_sampled(data) is False:
            # Logits of all tokens, of those that do not count too. A projection has those of some
            # tokens at a time only, but computes them twice, and a gradient of the whole layer.
            size = sum(map(len, known)) * (vocabulary or _CLASSES)
            is_small = len(known) == len(data) and size <= _LOGITS
            needs = ("logits", "projection") if is_small else ("projection", "logits")
            return next(((need,) for need in needs if need in gives), ())
    return ()


def _together(rows: Sequence[DatumRow], outputs: Sequence[Any]) -> list[tuple[Any, Tensor | None]]:
    """Logits or projection of each datum with its mask; or one projection of all that counts.

    The gradient of the output layer, `[classes, features]`, is then computed once and not for each
    datum.
    """
    pairs = list(zip(outputs, (row.mask for row in rows), strict=True))
    first = outputs[0]
    if not isinstance(first, Projection) or any(
        other.weight is not first.weight or other.bias is not first.bias for other in outputs
    ):
        return pairs
    counted = [row.keep(own.hidden) for row, own in zip(rows, outputs, strict=True)]
    return [(replace(first, hidden=torch.cat(counted)), None)]


def _require_sampled(data: Any, rank: int, level: str = "token") -> None:
    """Check that log-probs `[T]` are of tokens that the model sampled, as far as the data say.

    Raises:
        InputError: they are not.
    """
    if rank > 1 or were_sampled(data) is not False:
        return
    if level == "sequence":
        raise InputError(
            "level='sequence' takes sequences that the model sampled, and the data have no "
            "sampling log-probs, in the field 'logprobs': give them these, or train on "
            "steelyard.engine with level='token', which reads the whole vocabulary."
        )
    raise InputError(
        "an entropy from log-probs [T] takes tokens that the model sampled, and the data have no "
        "sampling log-probs, in the field 'logprobs': -log p of fixed tokens is their NLL. Train "
        "on steelyard.engine, where it is computed exactly over the whole vocabulary, or give the "
        "data their sampling log-probs, importance=... or [T, K] targets. For logits of your own "
        "there is steelyard.penalties.from_logits.entropy."
    )
