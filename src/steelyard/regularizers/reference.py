"""Divergence from a reference: another model's log-probs, or a paired datum of the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from array_api_compat import torch as xp
from torch import Tensor

from steelyard import penalties
from steelyard.composition.per_datum import PerDatum
from steelyard.errors import InputError
from steelyard.gradients.datum_fields import were_sampled
from steelyard.gradients.layout import LogProbs
from steelyard.penalties.divergences import MAX_LOG_RATIO, js_rows, kl_rows
from steelyard.regularizers import _options
from steelyard.regularizers._estimators import (
    REFERENCE_OF,
    datum_ratios,
    importance_ratios,
    js_tokens,
    kl_to_base,
    kl_tokens,
    require_samples,
    reward_to_go,
    sampled_js,
    sampled_kl,
    vocabulary_input,
    with_gradient_of,
    with_tail,
)
from steelyard.regularizers._tokens import (
    DatumRow,
    Source,
    batch_pairs,
    counted_rows,
    mean,
    rank_of,
)

REFERENCE = "reference_logprobs"
SAME_MODEL = "its reference is the model itself"


@dataclass(frozen=True)
class _Estimate:
    """Choice of the summands of `kl_tokens` that are the value and that are differentiated.

    Attributes:
        value: name of the summands whose mean is the value.
        gradient: name of those whose mean is differentiated.
        metrics: names of summands, by the name of the metric that is their mean.
        is_kl: whether the value estimates a KL divergence.
    """

    value: str
    gradient: str
    metrics: Mapping[str, str]
    is_kl: bool = True


_METRICS = {key: key for key in ("k1", "k2", "k3")}
_ON_POLICY = _Estimate("clamped_k3", "k2", {**_METRICS, "k3": "clamped_k3"})
_LOG_RATIO = {"log_ratio": "k1", "half_squared_log_ratio": "k2"}
_ON_FIXED_DATA = _Estimate("k2", "k2", _LOG_RATIO, is_kl=False)


@dataclass(frozen=True, kw_only=True)
class KLToReference:
    """KL divergence KL(p‖r) of the model's predictions p from a reference r, mean over tokens.

    `[T]`: estimated from sampled tokens, with δ = log p - log r of each. By default,
    `estimator="auto"`, it depends on where the tokens come from:

    * **sampled from the model that is trained**: data with the field `logprobs`, the log-probs at
      which their tokens were sampled, or no data to ask. The value is the mean of k3 =
      (r/p - 1) - log(r/p), whose expectation is KL(p‖r) and which is never below 0, with the
      log-ratio clamped to ±20, since r/p explodes. The gradient is that of k2 = ½ δ², since its
      expectation is the gradient of KL(p‖r); that of k3 is the gradient of KL(r‖p).
    * **fixed data**, without that field: ½ δ², value and gradient. Tokens that the model did not
      choose say nothing about its distribution, so that this is **no KL divergence, but a penalty
      on the log-ratio of the data's tokens**, and its metrics are `log_ratio`, the mean of δ, and
      `half_squared_log_ratio`. It pulls each log-prob to the reference's, and is a brake on the
      task: a mean of at most b allows the loss of these tokens to fall by at most √(2b).
    * **fixed data of the term's own** (`data=` of its spec), where the client runs the base model
      beside the trained one, as the engine does: the KL over the whole vocabulary, as `"exact"`.
    * with `importance`: w·k3, see below.

    The other estimators, wherever the tokens come from:

    * `"exact"`: KL(p‖r) of the distributions over the whole vocabulary, with the base model as the
      reference, at each token that counts. It needs the engine; **the gradient is exact**.
    * `"k1"` = δ. The expectation of the value is KL(p‖r), but the gradient with respect to log p
      is 1 whatever r is: zero in expectation on policy. It measures, and a term that is trained on
      it is refused, unless with `level="sequence"` or `importance`.
    * `"k2"` = ½ δ². The value is biased, 1.5 times KL(p‖r) at 0.3 nats; the expected gradient on
      policy is that of KL(p‖r).
    * `"k3"`, without a clamp. The value is unbiased; the expected gradient on policy is that of
      KL(r‖p).

    On policy means: the tokens were sampled from the model being trained. These gradients hold the
    context of each token fixed; KL(p‖r) of whole sequences also changes with the contexts that the
    model visits, which `level="sequence"` counts.

    `importance` is for tokens sampled from q, an older or another model: with w = p/q of each
    token, w·k1 and w·k3 have the value and the gradient of KL(p‖r) in expectation over tokens
    sampled from q, and w·k2 the gradient, in the contexts that were sampled. k3 is the usual
    choice: its gradient is w δ, and its value never below 0. With `level="sequence"` w is the
    product over the token and those before it, and the contexts count as if they were sampled
    from p.

    `[T, K]`: the divergence over the K classes and one tail class with the remaining mass; a
    lower bound of the true one. **The gradient is exact.**

    A bound (`at_most`) is on the value.

    Usual weights: 0.01 to 0.1, on sampled answers beside a mean per token; or `at_most=0.1`.

    Reads from each datum: the reference, of the shape of its log-probs; `weights` (optional),
    where 0 leaves a token out; `logprobs` (optional), see above; `importance`, if that is a field.

    Args:
        reference: the field of `loss_fn_inputs` with the reference's log-probs, or a function
            `(datum, index)` that gives them.
        estimator: `"auto"`, `"exact"`, `"k1"`, `"k2"` or `"k3"`, for `[T]`. `"exact"` is the KL to
            the base model over the whole vocabulary, which the engine computes; `"auto"` is that
            too for a term with data of its own, where the client runs the base model.
        direction: for `[T, K]` and the exact KL: `"forward"` is KL(p‖r), `"reverse"` KL(r‖p),
            `"symmetric"` their mean.
        level: `"token"`, or `"sequence"`, for `[T]` with `"auto"`, `"k1"` or `"k2"`, which says
            that the tokens were sampled from the model: the value is that of the estimator, for
            `"auto"` k3, and the gradient of token t is the sum of δ over it and the tokens after it
            (REINFORCE with the reward-to-go; of higher variance), divided by the number of tokens.
        importance: the field of `loss_fn_inputs` with the log-probs log q of the tokens when they
            were sampled (`"logprobs"` in Tinker's RL data), or a function `(datum, index)`; None:
            they were sampled from the model being trained. Needs `[T]`.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> fields = {"reference_logprobs": [-1.0, -2.0], "logprobs": [-1.5, -1.0]}
        >>> data = [{"loss_fn_inputs": fields}]
        >>> loss, metrics = KLToReference().compute(data, [torch.tensor([-1.5, -1.0])])
        >>> loss, metrics["k1"], metrics["k2"]  # δ is -0.5 and 1
        (tensor(0.2583), 0.25, 0.3125)

    References:
        Schulman (2020), "Approximating KL divergence"; DeepSeek-AI (2025), "DeepSeek-V3.2",
        section 3.1 (w·k3, the unbiased estimate off policy).
    """

    reference: Source = REFERENCE
    estimator: Literal["auto", "exact", "k1", "k2", "k3"] = "auto"
    direction: Literal["forward", "reverse", "symmetric"] = "forward"
    level: Literal["token", "sequence"] = "token"
    importance: Source | None = None
    name: ClassVar[str] = "kl_to_reference"
    zero_means: ClassVar[str] = SAME_MODEL

    def __post_init__(self) -> None:
        _options.resolve_source(self, "reference")
        _options.one_of("estimator", self.estimator, ("auto", "exact", "k1", "k2", "k3"), self.name)
        directions = ("forward", "reverse", "symmetric")
        _options.one_of("direction", self.direction, directions, self.name)
        _options.one_of("level", self.level, ("token", "sequence"), self.name)
        fits = self.level == "token" or self.estimator not in ("exact", "k3")
        rule = f"'token' with estimator={self.estimator!r}"
        _options.require(fits, "level", rule, self.level, self.name)
        _options.resolve_source(self, "importance", optional=True)
        if self.estimator == "exact":
            rule = "left out with estimator='exact', which reads whole distributions"
            _options.require(
                self.importance is None, "importance", rule, self.importance, self.name
            )
            rule = f"{REFERENCE!r} with estimator='exact', whose reference is the base model"
            _options.require(
                self.reference == REFERENCE, "reference", rule, self.reference, self.name
            )

    @property
    def measures_only(self) -> str:
        """Why it must not be trained on, with the cure; empty if it may."""
        if self.estimator != "k1" or self.level == "sequence" or self.importance is not None:
            return ""
        return (
            "the gradient of estimator='k1' at level='token' has the expectation 0; use "
            "estimator='auto', or level='sequence', or read the metric k1"
        )

    def needs_for(self, data: Any, gives: Collection[str], *, own: bool = False) -> tuple[str, ...]:
        """Need the whole vocabulary, of the policy and of the base model: see `ChoosesNeeds`."""
        is_token_estimate = self.importance is not None or self.level == "sequence"
        by_default = self.estimator == "auto" and own and not is_token_estimate
        if self.estimator != "exact" and not (by_default and self.reference == REFERENCE):
            return ()
        policy = vocabulary_input(data, gives)
        if policy is None or REFERENCE_OF[policy] not in gives:
            return ()
        return (policy, REFERENCE_OF[policy])

    def compute(
        self, data: Any, logprobs: LogProbs, **whole: Any
    ) -> tuple[Tensor, dict[str, float]] | Any:
        """Compute the penalty of a batch; for `[T]` with the metrics `k1`, `k2` and `k3`.

        On fixed data with `log_ratio` and `half_squared_log_ratio` instead, and with `importance`
        also the mean `ratio` of the tokens. The exact KL has no metrics.

        Args:
            data: of the batch.
            logprobs: of its tokens.
            whole: `logits` and `reference_logits`, `[T, V]` for each datum, or `projection` and
                `reference_projection`; then the KL is exact.

        Raises:
            InputError: the KL is to be exact, and these are not given.
        """
        rows = counted_rows(data, logprobs, classes=True)
        if not rows:
            return None
        if whole:
            return kl_to_base(rows, whole, self.direction), {}
        if self.estimator == "exact":
            raise InputError(
                "estimator='exact' takes the distributions of the model and of the base model, "
                "which steelyard.engine computes, and the client does not: train there, or use "
                "estimator='auto'."
            )
        if rows[0].logprobs.dim() == 1:
            return self._from_samples(rows, self._estimate(data))
        require_samples(self.level, self.importance)
        divergences = [
            penalties.kl_divergence(p, r, direction=self.direction, reduction="none")
            for p, r in _distributions(rows, self.reference)
        ]
        return mean(torch.cat(divergences)), {}

    def _estimate(self, data: Any) -> _Estimate:
        """Estimate for these data."""
        if self.estimator != "auto":
            return _Estimate(self.estimator, self.estimator, _METRICS)
        if self.importance is not None:
            return _Estimate("k3", "k3", _METRICS)
        if self.level == "token" and were_sampled(data) is False:
            return _ON_FIXED_DATA
        return _ON_POLICY

    def _from_samples(
        self, rows: list[DatumRow], estimate: _Estimate
    ) -> tuple[Tensor, dict[str, float]]:
        self._require_forward()
        own, reference = _tokens_and_reference(rows, self.reference)
        ratios = None
        if self.importance is not None:
            ratios = importance_ratios(rows, self.importance, self.level)
        means = sampled_kl(own, reference, ratios)
        metrics = {name: means[key].item() for name, key in estimate.metrics.items()}
        if ratios is not None:
            metrics["ratio"] = mean(ratios).item()
        value, surrogate = means[estimate.value], means[estimate.gradient]
        if self.level == "sequence":
            costs = own - reference if ratios is None else ratios * (own - reference)
            by_datum = torch.split(costs, [row.kept.shape[0] for row in rows])
            rewards = torch.cat([reward_to_go(datum_costs) for datum_costs in by_datum])
            surrogate = mean(rewards * own)
        if surrogate is not value:
            value = with_gradient_of(surrogate, value=value)
        return value, metrics

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`."""
        if rank_of(shapes) > 1:
            require_samples(self.level, self.importance)
            return PerDatum(self._row_values, {"reference": self.reference})
        self._require_forward()
        estimate = self._estimate(data)
        fields: dict[str, Source] = {"reference": self.reference}
        metrics: dict[str, Any] = {
            name: (partial(self._token_values, key), "mean")
            for name, key in estimate.metrics.items()
        }
        if self.importance is not None:
            fields["sampled"] = self.importance
            metrics["ratio"] = (self._token_ratios, "mean")
        gradient_of = None
        if self.level == "sequence":
            gradient_of = self._rewarded
        elif estimate.gradient != estimate.value:
            gradient_of = partial(self._token_values, estimate.gradient)
        return PerDatum(
            partial(self._token_values, estimate.value),
            fields,
            gradient_of=gradient_of,
            metrics=metrics,
            variant="" if estimate.is_kl else "fixed data",
        )

    def _row_values(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        p, r = with_tail(logprobs), with_tail(reference)
        rows: Tensor = kl_rows(xp, p, r, self.direction, -1, MAX_LOG_RATIO)
        return rows

    def _token_values(
        self, key: str, logprobs: Tensor, reference: Tensor, sampled: Tensor | None = None
    ) -> Tensor:
        ratios = None if sampled is None else datum_ratios(logprobs, sampled, self.level)
        return kl_tokens(logprobs, reference, ratios)[key]

    def _token_ratios(self, logprobs: Tensor, reference: Tensor, sampled: Tensor) -> Tensor:  # noqa: ARG002
        return datum_ratios(logprobs, sampled, self.level)

    def _rewarded(
        self, logprobs: Tensor, reference: Tensor, sampled: Tensor | None = None
    ) -> Tensor:
        return reward_to_go(self._token_values("k1", logprobs, reference, sampled)) * logprobs

    def _require_forward(self) -> None:
        if self.direction != "forward":
            raise InputError(
                f"direction must be 'forward' for log-probs [T], whose estimators are of KL(p‖r), "
                f"got {self.direction!r}: use [T, K] targets."
            )


@dataclass(frozen=True, kw_only=True)
class JSToReference:
    """Jensen-Shannon divergence of the model's predictions p and a reference r, mean over tokens.

    `[T]`: estimated from the sampled tokens; with u = r/p of each, the value is the mean of
    `½ (u log u - (1 + u) log((1 + u)/2))`, never below 0, with log u limited to 20. **The gradient
    is an estimator**, `-½ log((1 + u)/2)` per token, divided by their number. If the tokens were
    sampled from the model being trained, value and gradient are unbiased. On fixed data they are
    **no divergence, but a penalty on the log-ratio of the data's tokens**: it moves each log-prob
    towards the reference's, with a gradient of at most ½ log 2 where the model is more confident
    (u < 1).

    `[T, K]`: over the K classes and one tail class with the remaining mass, between 0 and
    log 2; a lower bound of the true one. **The gradient is exact.**

    Reads from each datum: the reference, of the shape of its log-probs; `weights` (optional),
    where 0 leaves a token out.

    Args:
        reference: as in `KLToReference`.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> data = [{"loss_fn_inputs": {"reference_logprobs": [[-0.6931, -1.6094]]}}]
        >>> loss = JSToReference().compute(data, [torch.tensor([[-0.6931, -1.6094]])])
        >>> loss
        tensor(0.)

    References:
        Lin (1991), "Divergence measures based on the Shannon entropy".
    """

    reference: Source = REFERENCE
    name: ClassVar[str] = "js_to_reference"
    zero_means: ClassVar[str] = SAME_MODEL

    def __post_init__(self) -> None:
        _options.resolve_source(self, "reference")

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch."""
        rows = counted_rows(data, logprobs, classes=True)
        if not rows:
            return None
        if rows[0].logprobs.dim() == 1:
            return sampled_js(*_tokens_and_reference(rows, self.reference))
        divergences = [
            penalties.js_divergence(p, r, reduction="none")
            for p, r in _distributions(rows, self.reference)
        ]
        return mean(torch.cat(divergences))

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:  # noqa: ARG002 - all from fields
        """Form per datum: see `Separable`."""
        fields = {"reference": self.reference}
        if rank_of(shapes) > 1:
            return PerDatum(
                lambda logprobs, reference: js_rows(
                    xp, with_tail(logprobs), with_tail(reference), -1
                ),
                fields,
            )
        return PerDatum(
            lambda logprobs, reference: js_tokens(logprobs, reference)[0],
            fields,
            gradient_of=lambda logprobs, reference: js_tokens(logprobs, reference)[1],
        )


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """Disagreement of paired data, for example of the same answer under two prompts.

    Mean over the tokens of all pairs, with a and b the log-probs of a pair's tokens: `"mse"`
    (a - b)², `"l1"` |a - b|; for `[T, K]`, over K classes and their tail, `"kl"` is the symmetric
    ½ KL(a‖b) + ½ KL(b‖a) and `"js"` the Jensen-Shannon divergence. With `level="sequence"` a and
    b are the mean log-probs of the two data, which may then differ in length, and the mean is
    over pairs; one in which a datum has no token that counts is left out.

    The gradient is exact, and flows into both data of a pair.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; both data of a pair
    must have the same number of remaining tokens. `pair`, if that is a field.

    Args:
        metric: `"mse"`, `"l1"`, `"kl"` or `"js"`.
        level: `"token"` or `"sequence"` (`"mse"` and `"l1"` of `[T]`).
        pair: a field, or a function `(datum, index)`, that gives both data of a pair the same
            label; None: neighbours are pairs (0 and 1, 2 and 3, ...).

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> lps = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -4.0])]
        >>> Consistency().compute([], lps)
        tensor(2.)
    """

    metric: Literal["mse", "l1", "kl", "js"] = "mse"
    level: Literal["token", "sequence"] = "token"
    pair: Source | None = None
    name: ClassVar[str] = "consistency"

    def __post_init__(self) -> None:
        _options.one_of("metric", self.metric, ("mse", "l1", "kl", "js"), self.name)
        _options.one_of("level", self.level, ("token", "sequence"), self.name)
        _options.resolve_source(self, "pair", optional=True)
        fits = self.level == "token" or self.metric in ("mse", "l1")
        rule = "'token' with metric='kl' or 'js'"
        _options.require(fits, "level", rule, self.level, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor | Any:
        """Compute the penalty of a batch."""
        rows = counted_rows(data, logprobs, classes=self.metric in ("kl", "js"))
        values = [self._disagreement(a, b) for a, b in batch_pairs(rows, self.pair)]
        return torch.cat(values).mean() if sum(map(len, values)) else None

    def _disagreement(self, first: DatumRow, second: DatumRow) -> Tensor:
        """Disagreement of each token of a pair, `[T]`, or of the two means, `[1]`."""
        a, b = first.kept, second.kept
        if self.level == "sequence":
            pairs = min(len(a), len(b), 1)  # 0 if a datum has no mean
            a, b = (mean(x).reshape(1)[:pairs] for x in (a, b))
        if a.shape != b.shape:
            raise InputError(
                f"datum {first.index} and datum {second.index} must have as many tokens that "
                f"count, got the shapes {list(a.shape)} and {list(b.shape)}.",
                datum=first.index,
            )
        if self.metric in ("kl", "js") and a.dim() == 1:
            raise InputError(
                f"metric must be 'mse' or 'l1' for log-probs [T], which are no distributions, "
                f"got {self.metric!r}: use [T, K] targets."
            )
        if self.metric in ("kl", "js"):
            a, b = with_tail(a), with_tail(b)
        values: Tensor
        if self.metric == "js":
            values = penalties.js_divergence(a, b, reduction="none")
        else:
            values = penalties.consistency(a, b, metric=self.metric, reduction="none")
        return values


def _tokens_and_reference(rows: list[DatumRow], reference: Source) -> tuple[Tensor, Tensor]:
    """Log-probs of all unmasked tokens of the batch, `[N]`, and those of the reference."""
    own = torch.cat([row.kept for row in rows])
    return own, torch.cat([row.read_per_token(reference) for row in rows])


def _distributions(rows: list[DatumRow], reference: Source) -> list[tuple[Tensor, Tensor]]:
    """`[T, K + 1]` log-probs of model and reference, of each datum."""
    return [(with_tail(row.kept), with_tail(row.read_per_token(reference))) for row in rows]
