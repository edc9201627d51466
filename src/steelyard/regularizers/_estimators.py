"""Entropy and divergences: estimated from log-probs of tokens or listed classes, or exact.

A server returns the log-prob of each *target* token: `[T]` per datum, not a distribution. The
`sampled_*` functions estimate from these, concatenated over a batch to `[N]`. Expectations below
are *on policy*: over tokens sampled from p, the model being trained, **with the contexts of the
tokens held fixed**: that the model also visits other contexts when it changes is left out. The
functions with `sequence` in their name count that too. They use two identities of the score
∇ log p (∇ with respect to the parameters):

* `E_p[∇ log p] = Σ p ∇ log p = ∇ Σ p = 0`;
* for `D = E_p[f(r/p)]`, `∇D = E_p[(f(u) - u f'(u)) ∇ log p]` with u = r/p.

*Off policy* the tokens were sampled from q, an older or another model. Then
`E_q[w x] = E_p[x]` with the importance ratio w = p/q: the functions that take `ratios` weight each
token by it, and the expectations below hold over tokens sampled from q.

With `[T, K]` log-probs of listed classes, `with_tail` completes a distribution. With logits or a
projection at hand, `kl_to_base` computes the divergence over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from steelyard.errors import InputError
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits.projection import Projection
from steelyard.regularizers._tokens import DatumRow, Source, mean

TAIL_FLOOR = 1e-8
# Where a value grows as r/p, one token would otherwise be most of a batch, or infinite.
MAX_LOG_RATIO = 20.0
# Stands for log 0 in every dtype: its exponential is 0, and 0 · _LOG_ZERO is 0.
_LOG_ZERO = -1e4
# Batches of at most this many logits, 256 MB in float32, are computed from logits: 512 tokens over
# a vocabulary of unknown size, which is taken for one of 2^17.
_LOGITS, _CLASSES = 2**26, 2**17
REFERENCE_OF = {"logits": "reference_logits", "projection": "reference_projection"}


def with_gradient_of(surrogate: Tensor, value: Tensor) -> Tensor:
    """Scalar that equals `value` and is differentiated as `surrogate`."""
    # In this order: `surrogate - surrogate.detach()` is exactly 0, so the value is not rounded.
    return value.detach() + (surrogate - surrogate.detach())


def importance_ratios(rows: Sequence[DatumRow], sampling: Source, level: str) -> Tensor:
    """Importance ratio of each token that counts, `[N]`, differentiable; `sampling` gives log q.

    At the level `"token"`, `w_t = p_t/q_t`, which corrects the choice of the token in its context.
    At `"sequence"`, `Π_{s≤t} w_s`, which corrects that of the context too: the factor with which
    a quantity of token t has the expectation that it has over sequences sampled from p.

    Raises:
        InputError: a datum lacks log q, or it has another shape than the log-probs.

    References:
        Precup, Sutton & Singh (2000), "Eligibility traces for off-policy policy evaluation" (the
        product: per-decision importance sampling).
    """
    return torch.cat([datum_ratios(row.kept, row.read_per_token(sampling), level) for row in rows])


def datum_ratios(logprobs: Tensor, sampled: Tensor, level: str) -> Tensor:
    """`importance_ratios` of the tokens of one datum, whose log q are `sampled`."""
    logs = logprobs - sampled
    return (logs.cumsum(0) if level == "sequence" else logs).exp()


def sampled_entropy(logprobs: Tensor, ratios: Tensor | None = None) -> Tensor:
    """Estimate the entropy H from log-probs `[N]` of sampled tokens.

    The value is `-mean (w log p)`, unbiased. Its own gradient has expectation 0 for w = 1 by the
    first identity, so the gradient is that of `-½ mean w (log p)²` with w constant: per token
    `-w (log p) ∇ log p / N`, whose expectation `-E_p[log p ∇ log p]` is ∇H.
    """
    values, surrogates = entropy_tokens(logprobs, ratios)
    return with_gradient_of(mean(surrogates), value=mean(values))


def entropy_tokens(logprobs: Tensor, ratios: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Summands of `sampled_entropy`: of its value, and of what is differentiated."""
    surrogates = -0.5 * _weighted(logprobs.square(), ratios, constant=True)
    return -_weighted(logprobs, ratios), surrogates


def sequence_entropy(rows: Sequence[Tensor], ratios: Tensor | None = None) -> Tensor:
    """Estimate the entropy of whole sequences, per token, from log-probs `[T]` of each.

    The value is `-mean (w log p)` over all N tokens. The gradient is REINFORCE with the
    reward-to-go: `-(1/N) Σ_t (Σ_{s≥t} w_s log p_s) ∇ log p_t`, unbiased for ∇ of
    `-(1/N) E[Σ_t log p_t]`. A token changes the probability of all later contexts, hence the sum
    over the tokens after it. The ratios are those of the level `"sequence"`.

    References:
        Williams (1992), "Simple statistical gradient-following algorithms for connectionist
        reinforcement learning".
    """
    logprobs = torch.cat(list(rows))
    rewards = _weighted(logprobs, ratios)
    factors = torch.cat(
        [reward_to_go(row) for row in torch.split(rewards, [len(row) for row in rows])]
    )
    return with_gradient_of(-mean(factors * logprobs), value=-mean(rewards))


def sequence_entropy_tokens(
    logprobs: Tensor, ratios: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Summands of `sequence_entropy` for one datum: of its value, and of what is differentiated."""
    rewards = _weighted(logprobs, ratios)
    return -rewards, -reward_to_go(rewards) * logprobs


def reward_to_go(rewards: Tensor) -> Tensor:
    """Sum of each token's reward and those of the tokens after it in a datum: constants, `[T]`."""
    return rewards.detach().flip(0).cumsum(0).flip(0)


def sampled_confidence(logprobs: Tensor, threshold: float) -> Tensor:
    """Estimate `max(0, Γ - H)` from log-probs `[N]` of sampled tokens, Γ the threshold.

    The value is `max(0, Γ + mean log p)`. The gradient of token i is that of `½ (log p_i)² / N` if
    the entropy that the *other* tokens show, `-Σ_{j≠i} log p_j / (N - 1)`, is below Γ, else 0.
    The condition does not depend on token i, so the expectation is `-P(Ĥ₋ᵢ < Γ) ∇H`: that of an
    entropy bonus, times the probability that the others are overconfident. With a condition on all
    tokens, i included, it would be biased, for one token even of the wrong sign: only likely
    tokens would pass it. A single token has no others and always counts.
    """
    count = logprobs.numel()
    with torch.no_grad():
        others = (logprobs - logprobs.sum()) / max(count - 1, 1)
        counts = (others < threshold) if count > 1 else torch.ones_like(logprobs, dtype=torch.bool)
    value = (threshold + mean(logprobs)).clamp_min(0)
    return with_gradient_of(mean(0.5 * logprobs.square() * counts), value=value)


def sampled_kl(
    logprobs: Tensor, reference: Tensor, ratios: Tensor | None = None
) -> dict[str, Tensor]:
    """Estimate KL(p‖r) from log-probs `[N]` of sampled tokens, by Schulman's estimators.

    With δ = log p - log r, each a mean over tokens:

    * k1 = δ: unbiased, high variance; the expected gradient is 0.
    * k2 = ½ δ²: biased; the expected gradient E_p[δ ∇ log p] is ∇KL(p‖r).
    * k3 = (r/p - 1) - log(r/p): unbiased, never below 0; the expected gradient
      E_p[(1 - r/p) ∇ log p] = -Σ r ∇ log p is ∇KL(r‖p), of the other direction.
    * clamped k3: k3 of δ clamped to ±20. It differs from k3 where r/p is above e²⁰ or below e⁻²⁰,
      and stays finite.

    With ratios w = p/q each is multiplied by w. w·k1 and w·k3 are differentiated through w too:
    `E_q[w k] = E_p[k] = KL(p‖r)` holds for every p, so that the expected gradient of either is
    ∇KL(p‖r). Per token it is w (δ + 1) ∇ log p, and for k3 w δ ∇ log p, in which r/p cancels. For
    k2 w is a constant, which gives w δ ∇ log p as well; through w it would be ∇ E_p[½ δ²].

    References:
        Schulman (2020), "Approximating KL divergence"; DeepSeek-AI (2025), "DeepSeek-V3.2",
        section 3.1 (w·k3).
    """
    summands = kl_tokens(logprobs, reference, ratios)
    return {key: mean(tokens) for key, tokens in summands.items()}


def kl_tokens(
    logprobs: Tensor, reference: Tensor, ratios: Tensor | None = None
) -> dict[str, Tensor]:
    """Summands of `sampled_kl`, by estimator."""
    log_ratio = logprobs - reference
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "k1": _weighted(log_ratio, ratios),
        "k2": _weighted(0.5 * log_ratio.square(), ratios, constant=True),
        # r/p - 1 = expm1(-δ); exp(-δ) - 1 would cancel to nothing for a ratio near 1.
        "k3": _weighted(torch.expm1(-log_ratio) + log_ratio, ratios),
        "clamped_k3": _weighted(torch.expm1(-clamped) + clamped, ratios),
    }


def sampled_js(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate JS(p, r) from log-probs `[N]` of sampled tokens.

    With u = r/p and m = ½(p + r) = ½ p (1 + u), JS = E_p[f(u)] for
    `f(u) = ½ (u log u - (1 + u) log((1 + u)/2))`, never below 0. The value is mean f(u), unbiased;
    f grows as u, so that log u is limited to 20 there.
    The gradient is `-½ log((1 + u)/2) ∇ log p` per token, which is `(f - u f') ∇ log p` of the
    second identity: its expectation is ∇JS.

    References:
        Lin (1991), "Divergence measures based on the Shannon entropy".
    """
    values, surrogates = js_tokens(logprobs, reference)
    return with_gradient_of(mean(surrogates), value=mean(values))


def js_tokens(logprobs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Summands of `sampled_js`: of its value, and of what is differentiated."""
    # f(0) = ½ log 2: where the reference rules the token out, u log u = 0, not 0 · (-inf) = NaN.
    log_u = (reference - logprobs.detach()).clamp_min(_LOG_ZERO)
    surrogates = -0.5 * _log_middle(log_u) * logprobs
    log_u = log_u.clamp_max(MAX_LOG_RATIO)
    log_middle = _log_middle(log_u)
    # Rounding may leave u = 1 slightly below 0.
    values = (0.5 * (log_u.exp() * (log_u - log_middle) - log_middle)).clamp_min(0)
    return values, surrogates


def _log_middle(log_u: Tensor) -> Tensor:
    """`log((1 + u)/2)` by softplus(log u) = log(1 + u), which does not overflow for a large u."""
    return F.softplus(log_u) - math.log(2)


def require_samples(
    level: str, importance: object, what: str = "log-probs [T, K]", cure: str = "use [T] targets"
) -> None:
    """Check the options of sampled tokens for distributions: `"token"` and None.

    Raises:
        InputError: one differs: of a sequence only the sampled tokens have a probability.
    """
    if importance is not None:
        raise InputError(
            f"importance must be None for {what}, which are distributions and no sampled "
            f"tokens, got {importance!r}: {cure}."
        )
    if level != "token":
        raise InputError(
            f"level must be 'token' for {what}, which are distributions and no sampled "
            f"sequence, got {level!r}: {cure}."
        )


def with_tail(logprobs: Tensor) -> Tensor:
    """Append a tail class that holds the remaining mass: `[T, K]` log-probs to `[T, K + 1]`.

    `log tail = log max(1 - Σₖ pₖ, 1e-8)`. The listed classes and the tail are a distribution over
    K + 1 classes. Merging classes never raises an entropy, nor (data processing inequality) a
    KL or JS divergence, so one computed from them is a lower bound of that over all classes. The
    gradient flows through the tail: d log tail / d log pₖ = -pₖ / tail, and 0 at the floor.
    """
    # Summed in float64: in float32 a tail below 1e-7 would be rounding error alone.
    rest = 1 - logprobs.double().exp().sum(-1, keepdim=True)
    tail = rest.clamp_min(TAIL_FLOOR).log().to(logprobs.dtype)
    return torch.cat([logprobs, tail], dim=-1)


def _weighted(values: Tensor, ratios: Tensor | None, *, constant: bool = False) -> Tensor:
    if ratios is None:
        return values
    return values * (ratios.detach() if constant else ratios)


def vocabulary_input(
    data: Any, gives: Collection[str], vocabulary: int | None = None
) -> str | None:
    """Choose `"logits"` for small batches, else `"projection"`; None if neither is available.

    Logits are of all tokens, of those that do not count too. A projection has those of some tokens
    at a time only, but computes them twice, and a gradient of the whole layer.
    """
    if not isinstance(data, Sequence):
        return None
    targets = [loss_fn_input(datum, "target_tokens") for datum in data]
    known = [as_tensor(tokens) for tokens in targets if tokens is not None]
    if any(tokens.dim() > 1 for tokens in known):
        return None  # [T, K]: distributions already
    size = sum(map(len, known)) * (vocabulary or _CLASSES)
    is_small = len(known) == len(data) and size <= _LOGITS
    names = ("logits", "projection") if is_small else ("projection", "logits")
    return next((name for name in names if name in gives), None)


def kl_to_base(rows: Sequence[DatumRow], whole: Mapping[str, Any], direction: str) -> Tensor:
    """KL of the model's distributions and the base model's, mean over the tokens that count.

    Args:
        rows: the data.
        whole: `logits` and `reference_logits`, or `projection` and `reference_projection`, with an
            item for each datum.
        direction: as for `from_logits.kl`.
    """
    policy = next(name for name in REFERENCE_OF if name in whole)
    triples = zip(rows, whole[policy], whole[REFERENCE_OF[policy]], strict=True)
    pairs = [(_counted(row, own), _counted(row, base)) for row, own, base in triples]
    if policy == "projection":
        # The gradient of the output layer, `[classes, features]`, is then computed once.
        own, base = (_stacked(column) for column in zip(*pairs, strict=True))
        pairs = [(own, base)]
    options: Any = {"direction": direction, "reduction": "sum"}
    sums = [from_logits.kl(own, base, **options) for own, base in pairs]
    return torch.stack(sums).sum() / sum(len(row.kept) for row in rows)


def _counted(row: DatumRow, distribution: Any) -> Any:
    """The logits or the projection of the tokens that count."""
    if isinstance(distribution, Projection):
        return replace(distribution, hidden=row.keep(distribution.hidden))
    return row.keep(distribution)


def _stacked(projections: Sequence[Projection]) -> Projection:
    """One projection of all tokens; the data share the output layer."""
    return replace(
        projections[0], hidden=torch.cat([projection.hidden for projection in projections])
    )
