"""Distance from a reference: another model's log-probs, or a partner's in the same batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from steelyard import penalties
from steelyard.errors import InputError
from steelyard.gradients import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._estimate import with_gradient_of
from steelyard.regularizers._pairs import pairs_of
from steelyard.regularizers._tail import with_tail
from steelyard.regularizers._tokens import DatumRow, Source, mean, rows_of

REFERENCE = "reference_logprobs"


@dataclass(frozen=True, kw_only=True)
class KLToReference:
    """KL divergence from the model's predictions p to a reference r, averaged over tokens.

    `[T]`: estimated from the sampled tokens, with δ = log p - log r of each:

    * `"k1"` = δ. Its gradient is the same for every token whatever r is: zero in expectation
      on policy, so it measures but does not hold.
    * `"k2"` = ½ δ² (the default). **An estimator** whose gradient δ is, on policy, the
      unbiased one of KL(p‖r).
    * `"k3"` = (r/p - 1) - log(r/p), never below 0. The unbiased value of least variance; its
      gradient 1 - r/p is, on policy, that of KL(r‖p).

    On policy means: the tokens were sampled from the model being trained. On fixed data k2
    and k3 pull each token's log-prob to the reference's.

    `[T, K]`: the divergence over the K classes and one tail class with the remaining mass; a
    lower bound of the true one. **The gradient is exact.**

    Reads from each datum: the reference, of the shape of its log-probs; `weights` (optional),
    where 0 leaves a token out.

    Args:
        reference: the field of `loss_fn_inputs` with the reference's log-probs, or a function
            `(datum, index)` that gives them.
        estimator: `"k1"`, `"k2"` or `"k3"`, for `[T]`.
        direction: for `[T, K]`: `"forward"` is KL(p‖r), `"reverse"` KL(r‖p), `"symmetric"`
            their mean.

    Raises:
        SpecError: an option breaks its rule.

    Example:
        >>> data = [{"loss_fn_inputs": {"reference_logprobs": [-1.0, -2.0]}}]
        >>> loss, metrics = KLToReference().compute(data, [torch.tensor([-1.5, -1.0])])
        >>> loss, metrics["k1"]
        (tensor(0.3125), 0.25)

    References:
        Schulman (2020), "Approximating KL divergence".
    """

    reference: Source = REFERENCE
    estimator: Literal["k1", "k2", "k3"] = "k2"
    direction: Literal["forward", "reverse", "symmetric"] = "forward"
    name: ClassVar[str] = "kl_to_reference"

    def __post_init__(self) -> None:
        _options.settle_source(self, "reference")
        _options.one_of("estimator", self.estimator, ("k1", "k2", "k3"), self.name)
        directions = ("forward", "reverse", "symmetric")
        _options.one_of("direction", self.direction, directions, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]]:
        """The penalty of a batch; for `[T]` also every estimator's value."""
        rows = rows_of(data, logprobs, classes=True)
        if rows[0].logprobs.dim() == 1:
            return self._from_samples(rows)
        each = [
            penalties.kl_divergence(p, r, direction=self.direction, reduction="none")
            for p, r in _distributions(rows, self.reference)
        ]
        return mean(torch.cat(each)), {}

    def _from_samples(self, rows: list[DatumRow]) -> tuple[Tensor, dict[str, float]]:
        if self.direction != "forward":
            raise InputError(
                f"direction must be 'forward' for log-probs [T], whose estimators are of KL(p‖r), "
                f"got {self.direction!r}: use [T, K] targets."
            )
        ratio = torch.cat([row.kept - row.read_like(self.reference) for row in rows])
        estimates = {
            "k1": mean(ratio),
            "k2": mean(0.5 * ratio.square()),
            # expm1: the difference r/p - 1 would lose what is left of a ratio near 1.
            "k3": mean(torch.expm1(-ratio) + ratio),
        }
        metrics = {key: value.item() for key, value in estimates.items()}
        return estimates[self.estimator], metrics


@dataclass(frozen=True, kw_only=True)
class JSToReference:
    """Jensen-Shannon divergence between the model's predictions p and a reference r.

    `[T]`: estimated from the sampled tokens; with u = r/p of each, the value is the mean of
    `½ (u log u - (1 + u) log((1 + u)/2))`, never below 0. **The gradient is an estimator**,
    `-½ log((1 + u)/2)` per token: unbiased if the tokens were sampled from the model being
    trained; on fixed data it pulls each token's log-prob to the reference's, gently where the
    model is surer than the reference.

    `[T, K]`: over the K classes and one tail class with the remaining mass, between 0 and
    log 2; a lower bound of the true one. **The gradient is exact.**

    Reads from each datum: the reference, of the shape of its log-probs; `weights` (optional),
    where 0 leaves a token out.

    Args:
        reference: as in `KLToReference`.

    Raises:
        SpecError: an option breaks its rule.

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

    def __post_init__(self) -> None:
        _options.settle_source(self, "reference")

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor:
        """The penalty of a batch."""
        rows = rows_of(data, logprobs, classes=True)
        if rows[0].logprobs.dim() == 1:
            return self._from_samples(rows)
        distributions = _distributions(rows, self.reference)
        each = [penalties.js_divergence(p, r, reduction="none") for p, r in distributions]
        return mean(torch.cat(each))

    def _from_samples(self, rows: list[DatumRow]) -> Tensor:
        flat = torch.cat([row.kept for row in rows])
        reference = torch.cat([row.read_like(self.reference) for row in rows])
        with torch.no_grad():
            log_u = reference - flat
            middle = F.softplus(log_u) - math.log(2)
            # Rounding may leave u = 1 a little below 0.
            value = (0.5 * (log_u.exp() * (log_u - middle) - middle)).clamp_min(0)
        return with_gradient_of(mean(-0.5 * middle * flat), value=mean(value))


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """Disagreement between paired data: the same answer under two prompts, for example.

    Averaged over the tokens of all pairs, with a and b the log-probs of a pair's tokens:
    `"mse"` (a - b)², `"l1"` |a - b|; `"kl"` the symmetric KL, `"js"` the Jensen-Shannon
    divergence over K classes and their tail, for `[T, K]`. With `level="sequence"` a and b are
    the mean log-probs of the two data, which may then differ in length.

    The gradient is exact, through both.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; the tokens that
    are left must be as many in both. `pair`, if that is a field.

    Args:
        metric: `"mse"`, `"l1"`, `"kl"` or `"js"`.
        level: `"token"` or `"sequence"` (`"mse"` and `"l1"` of `[T]`).
        pair: a field, or a function `(datum, index)`, that gives both data of a pair the same
            label; None: neighbours are pairs (0 and 1, 2 and 3, ...).

    Raises:
        SpecError: an option breaks its rule.

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
        _options.settle_source(self, "pair", optional=True)
        fits = self.level == "token" or self.metric in ("mse", "l1")
        rule = "'token' with metric='kl' or 'js'"
        _options.require(fits, "level", rule, self.level, self.name)

    def compute(self, data: Any, logprobs: LogProbs) -> Tensor:
        """The penalty of a batch."""
        rows = rows_of(data, logprobs, classes=self.metric in ("kl", "js"))
        each = [self._between(a, b) for a, b in pairs_of(rows, self.pair)]
        return mean(torch.cat(each))

    def _between(self, first: DatumRow, second: DatumRow) -> Tensor:
        a, b = first.kept, second.kept
        if self.level == "sequence":
            a, b = mean(a).reshape(1), mean(b).reshape(1)
        if a.shape != b.shape:
            raise InputError(
                f"data {first.index} and {second.index} must have as many tokens that count, "
                f"got the shapes {list(a.shape)} and {list(b.shape)}."
            )
        if self.metric in ("kl", "js") and a.dim() == 1:
            raise InputError(
                f"metric must be 'mse' or 'l1' for log-probs [T], which are no distributions, "
                f"got {self.metric!r}: use [T, K] targets."
            )
        each: Tensor
        if self.metric == "js":
            each = penalties.js_divergence(with_tail(a), with_tail(b), reduction="none")
        elif self.metric == "kl":
            each = penalties.consistency(with_tail(a), with_tail(b), metric="kl", reduction="none")
        else:
            each = penalties.consistency(a, b, metric=self.metric, reduction="none")
        return each


def _distributions(rows: list[DatumRow], reference: Source) -> list[tuple[Tensor, Tensor]]:
    return [(with_tail(row.kept), with_tail(row.read_like(reference))) for row in rows]
