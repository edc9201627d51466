"""Estimators of entropy and divergences from log-probs of sampled tokens or listed classes.

A server returns the log-prob of each *target* token: `[T]` per datum, not a distribution. The
`sampled_*` functions estimate from these, concatenated over a batch to `[N]`. Expectations below
are *on policy*: over tokens sampled from p, the model being trained. They use two identities of
the score ∇ log p (∇ with respect to the parameters):

* `E_p[∇ log p] = Σ p ∇ log p = ∇ Σ p = 0`;
* for `D = E_p[f(r/p)]`, `∇D = E_p[(f(u) - u f'(u)) ∇ log p]` with u = r/p.

With `[T, K]` log-probs of listed classes, `with_tail` completes a distribution.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from steelyard.regularizers._tokens import mean

TAIL_FLOOR = 1e-8


def with_gradient_of(surrogate: Tensor, value: Tensor) -> Tensor:
    """Scalar that equals `value` and is differentiated as `surrogate`."""
    # In this order: `surrogate - surrogate.detach()` is exactly 0, so the value is not rounded.
    return value.detach() + (surrogate - surrogate.detach())


def sampled_entropy(logprobs: Tensor) -> Tensor:
    """Estimate the entropy H from log-probs `[N]` of sampled tokens.

    The value is `-mean log p`, unbiased. Its own gradient has expectation 0 by the first identity,
    so the gradient is that of `-½ mean (log p)²` instead: per token `-(log p) ∇ log p / N`, whose
    expectation `-E_p[log p ∇ log p]` is ∇H.
    """
    return with_gradient_of(-0.5 * mean(logprobs.square()), value=-mean(logprobs))


def sampled_kl(logprobs: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """Estimate KL(p‖r) from log-probs `[N]` of sampled tokens, by Schulman's three estimators.

    With δ = log p - log r, each a mean over tokens:

    * k1 = δ: unbiased, high variance; the expected gradient is 0.
    * k2 = ½ δ²: biased; the expected gradient E_p[δ ∇ log p] is ∇KL(p‖r).
    * k3 = (r/p - 1) - log(r/p): unbiased, never below 0; the expected gradient
      E_p[(1 - r/p) ∇ log p] = -Σ r ∇ log p is ∇KL(r‖p), of the other direction.

    References:
        Schulman (2020), "Approximating KL divergence".
    """
    log_ratio = logprobs - reference
    return {
        "k1": mean(log_ratio),
        "k2": mean(0.5 * log_ratio.square()),
        # r/p - 1 = expm1(-δ); exp(-δ) - 1 would cancel to nothing for a ratio near 1.
        "k3": mean(torch.expm1(-log_ratio) + log_ratio),
    }


def sampled_js(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimate JS(p, r) from log-probs `[N]` of sampled tokens.

    With u = r/p and m = ½(p + r) = ½ p (1 + u), JS = E_p[f(u)] for
    `f(u) = ½ (u log u - (1 + u) log((1 + u)/2))`, never below 0. The value is mean f(u), unbiased.
    The gradient is `-½ log((1 + u)/2) ∇ log p` per token, which is `(f - u f') ∇ log p` of the
    second identity: its expectation is ∇JS.

    References:
        Lin (1991), "Divergence measures based on the Shannon entropy".
    """
    with torch.no_grad():
        log_u = reference - logprobs
        # log((1 + u)/2) by softplus(log u) = log(1 + u), which does not overflow for a large u.
        log_middle = F.softplus(log_u) - math.log(2)
        # Rounding may leave u = 1 slightly below 0.
        value = (0.5 * (log_u.exp() * (log_u - log_middle) - log_middle)).clamp_min(0)
    return with_gradient_of(mean(-0.5 * log_middle * logprobs), value=mean(value))


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
