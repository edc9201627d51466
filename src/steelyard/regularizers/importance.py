"""Importance weights for the gradient of any term: truncated (TIS) and masked (MIS, IcePop)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from steelyard.gradients.estimators import read_costs, score_gradient
from steelyard.gradients.layout import LogProbs, flatten
from steelyard.regularizers import _options
from steelyard.regularizers._estimators import with_gradient_of
from steelyard.regularizers._tokens import DatumRow, Source, batch_rows
from steelyard.regularizers._wrapped import Wrapper, build_wrapped, then
from steelyard.spec.protocol import Stateful, entry_point


@dataclass(frozen=True, kw_only=True)
class _ImportanceSampling(Wrapper):
    """Base of the two wrappers, which differ in the weight of a ratio that is out of bounds."""

    regularizer: Any
    importance: Source = "logprobs"
    old: Source | None = None
    level: Literal["token", "sequence"] = "token"
    low: float | None = None
    high: float | None = None

    prefix: ClassVar[str]  # of the name
    call_options: dict[str, Any] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        _options.resolve_source(self, "importance")
        _options.resolve_source(self, "old", optional=True)
        _options.one_of("level", self.level, ("token", "sequence"), self.name)
        if self.low is not None:
            _options.at_least("low", self.low, 0, self.name)
        if self.high is not None:
            _options.at_least("high", self.high, self.low or 0, self.name)
        inner, options = build_wrapped(self.regularizer, self.name)
        object.__setattr__(self, "regularizer", inner)
        object.__setattr__(self, "call_options", options)
        rules = {
            "a term over log-probs alone: the weights do not reach other inputs": (
                not getattr(inner, "needs", ())
            ),
            "a term without state: wrap this one in it instead": not isinstance(inner, Stateful),
            "a term without importance weights of its own": (
                getattr(inner, "importance", None) is None
            ),
            "a term with a gradient of its own or gradient='score'": (
                getattr(inner, "gradient", "auto") != "numerical"
            ),
        }
        for rule, holds in rules.items():
            _options.require(holds, "regularizer", rule, inner, self.name)

    @property
    def name(self) -> str:
        """Name of the wrapped term after the kind of weights, such as `truncated_entropy`."""
        return f"{self.prefix}_{getattr(self.regularizer, 'name', None) or 'importance_sampling'}"

    @property
    def run_in(self) -> str:
        """Executor of the wrapped term."""
        return str(getattr(self.regularizer, "run_in", "auto"))

    @property
    def gradient(self) -> str:
        """Gradient method: that of the wrapped term, whose score function is differentiated."""
        return "autograd" if super().gradient == "score" else super().gradient

    def _compute(self, data: Any, logprobs: LogProbs) -> Any:
        weighted = _Weighted(data, logprobs, self)
        # The tokens were sampled, whatever the data say: `importance` is their log q.
        inner = getattr(self.regularizer, "compute_sampled", None) or entry_point(self.regularizer)
        return then(inner(data, weighted.logprobs, **self.call_options), weighted.result)

    async def _acompute(self, data: Any, logprobs: LogProbs) -> Any:
        return await self._compute(data, logprobs)

    def _weigh(self, ratio: Tensor) -> Tensor:
        raise NotImplementedError

    def _ratios(self, rows: list[DatumRow]) -> list[Tensor]:
        """Ratio of each token that counts, per datum; the same for all tokens of a sequence."""
        logs = []
        for row in rows:
            own = row.kept.detach() if self.old is None else row.read_per_token(self.old)
            log_ratio = own - row.read_per_token(self.importance)
            whole = self.level == "sequence"
            logs.append(log_ratio.sum().expand_as(log_ratio) if whole else log_ratio)
        return [log.exp() for log in logs]


@dataclass(frozen=True, kw_only=True)
class TruncatedImportanceSampling(_ImportanceSampling):
    """Truncated importance sampling (TIS) of any term or base loss over tokens sampled off policy.

    The tokens were sampled from q: an older version of the model, or the same one computed by an
    inference engine with other rounding. The gradient of the wrapped term with respect to the
    log-prob of each token is multiplied by `clamp(w, low, high)`, a constant, with w = p/q of the
    token, or with `level="sequence"` of the whole datum: `w = exp(Σ_t (log p_t - log q_t))`. The
    value stays that of the wrapped term.

    Without bounds, a term whose gradient is an unbiased estimate on policy has one off policy, of
    the same quantity: `E_q[w g ∇ log p] = E_p[g ∇ log p]`, exactly with `level="sequence"`, and
    with `"token"` in the contexts that were sampled. The bounds trade bias for a lower variance:
    the expectation is `Σ clamp(p, low·q, high·q) g ∇ log p`.

    A term that returns one penalty per datum (`gradient="score"`, such as a length penalty) gets
    its score-function gradient times the weights. Do not wrap a loss that contains the ratio
    already, such as Tinker's `importance_sampling` or `ppo` (unless with `old`), and do not
    use `gradient="numerical"`: differences of the value do not see the weights.

    Reads from each datum: the fields of the wrapped term; `importance` and `old`, if these are
    fields; `weights` (optional), where 0 leaves a token out.

    Args:
        regularizer: the term to weight: an object, a function, a registered name, or
            `{"fn": ..., "options": {...}}`. It reads `[T]` log-probs, and may be async.
        importance: the field of `loss_fn_inputs` with the log-probs log q of the tokens when they
            were sampled, or a function `(datum, index)`.
        old: the field with the log-probs log p of the ratio, for a loss that corrects the change
            of the model since by itself, as PPO does; None: those of the model being trained.
        level: `"token"` or `"sequence"`.
        low: the lowest weight; None: 0.
        high: the highest weight; None: no limit.

    Raises:
        SpecError: an option is invalid, or the wrapped term cannot be weighted.
        RegistryError: `regularizer` is a name that is not registered.

    Example:
        >>> from steelyard.regularizers import L2
        >>> data = [{"loss_fn_inputs": {"logprobs": [-1.0, -3.0]}}]
        >>> lp = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> loss, metrics = TruncatedImportanceSampling(regularizer=L2()).compute(data, [lp])
        >>> loss.backward()
        >>> loss.item(), lp.grad  # the ratios are 1 and e²
        (1.0, tensor([-1., -2.]))
        >>> metrics["clipped"]
        0.5

    References:
        Ionides (2008), "Truncated importance sampling"; Yao et al. (2025), "Your efficient RL
        framework secretly brings you off-policy RL training" (TIS, with high = 2).
    """

    high: float | None = 2.0
    prefix: ClassVar[str] = "truncated"

    def _weigh(self, ratio: Tensor) -> Tensor:
        # An infinite bound instead of None: torch.clamp refuses two that are None.
        high = torch.inf if self.high is None else self.high
        return ratio.clamp(self.low or 0.0, high)


@dataclass(frozen=True, kw_only=True)
class MaskedImportanceSampling(_ImportanceSampling):
    """Masked importance sampling (MIS, IcePop) of any term or base loss over off-policy tokens.

    As `TruncatedImportanceSampling`, but a ratio w outside `[low, high]` gets the weight 0 instead
    of that of the bound: the token (or with `level="sequence"` the datum) has no gradient. It still
    counts in the value and in the denominators of the wrapped term. The expected gradient is that
    of the tokens within the bounds: `Σ_{low ≤ p/q ≤ high} p g ∇ log p`.

    Reads from each datum: as `TruncatedImportanceSampling`.

    Args:
        regularizer: as in `TruncatedImportanceSampling`, and so `importance`, `old` and `level`.
        importance: the field with the log-probs at which the tokens were sampled.
        old: the field with the log-probs of the ratio's numerator; None: the current ones.
        level: `"token"` or `"sequence"`.
        low: the lowest ratio that counts; None: 0.
        high: the highest ratio that counts; None: no limit.

    Raises:
        SpecError: an option is invalid, or the wrapped term cannot be weighted.
        RegistryError: `regularizer` is a name that is not registered.

    Example:
        >>> from steelyard.regularizers import L2
        >>> data = [{"loss_fn_inputs": {"logprobs": [-1.0, -3.0]}}]
        >>> lp = torch.tensor([-1.0, -1.0], requires_grad=True)
        >>> loss, _ = MaskedImportanceSampling(regularizer=L2()).compute(data, [lp])
        >>> loss.backward()
        >>> lp.grad  # the ratios are 1 and e²
        tensor([-1., -0.])

    References:
        Ling Team (2025), "Every step evolves: scaling reinforcement learning for trillion-scale
        thinking model", arXiv:2510.18855 (IcePop, with low = 0.5 and high = 5).
    """

    low: float | None = 0.5
    high: float | None = 5.0
    prefix: ClassVar[str] = "masked"

    def _weigh(self, ratio: Tensor) -> Tensor:
        high = torch.inf if self.high is None else self.high
        return torch.where((ratio >= (self.low or 0.0)) & (ratio <= high), ratio, 0.0)


class _Weighted:
    """Log-probs of a batch whose gradient is multiplied by the weights."""

    def __init__(self, data: Any, logprobs: LogProbs, sampling: _ImportanceSampling) -> None:
        self._data, self._sampling = data, sampling
        self._rows = batch_rows(data, logprobs)
        ratios = sampling._ratios(self._rows)  # noqa: SLF001 - of this file
        weights = [sampling._weigh(ratio) for ratio in ratios]  # noqa: SLF001
        self._metrics = _metrics(torch.cat(ratios), torch.cat(weights))
        pairs = zip(self._rows, weights, strict=True)
        scaled = [_scale(row, row_weights) for row, row_weights in pairs]
        # In the structure that the caller gave.
        self.logprobs: LogProbs = scaled[0] if isinstance(logprobs, Tensor) else scaled

    def result(self, returned: Any) -> tuple[Any, dict[str, float]]:
        """Result of the wrapped term as a scalar, with its metrics and those of the weights."""
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        if loss is not None and getattr(self._sampling.regularizer, "gradient", "auto") == "score":
            loss = self._score(loss)
        return loss, {**(metrics or {}), **self._metrics}

    def _score(self, costs: Any) -> Tensor:
        """Mean of the costs, with the gradient of the score function times the weights.

        The weight multiplies the cost less its baseline. A weighted cost less a baseline would be
        biased: off policy the score ∇ log p, unweighted, does not have the expectation 0.
        """
        name, (layout, flat) = self._sampling.name, flatten(self.logprobs)
        costs = read_costs(name, costs, layout)
        factors = score_gradient(name, costs, self._data, layout).to(flat)
        scaled = [self.logprobs] if isinstance(self.logprobs, Tensor) else self.logprobs
        surrogates = [
            (row.keep(factor) * row.keep(own)).sum()
            for row, factor, own in zip(
                self._rows, torch.split(factors, layout.sizes), scaled, strict=True
            )
        ]
        return with_gradient_of(torch.stack(surrogates).sum(), value=costs.mean().to(flat))


def _scale(row: DatumRow, weights: Tensor) -> Tensor:
    """Log-probs of a datum, whose gradient is multiplied by the weights of its tokens."""
    if row.mask is not None:
        weights = torch.ones_like(row.logprobs.detach()).masked_scatter(row.mask, weights)
    scale: Callable[[Tensor, Tensor], Tensor] = _ScaleGradient.apply
    return scale(row.logprobs, weights)


class _ScaleGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a constant, also where the values are not finite."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # torch passes one
        (weights,) = ctx.saved_tensors
        return gradients[0] * weights, None


def _metrics(ratios: Tensor, weights: Tensor) -> dict[str, float]:
    count = max(ratios.numel(), 1)
    return {
        "ratio": ratios.sum().item() / count,
        "ratio_max": ratios.max().item() if ratios.numel() else 0.0,
        "clipped": (ratios != weights).sum().item() / count,
    }
