"""Choice of the next token of each row of a batch, by noise that belongs to that row alone.

With logits `z`, a temperature `t`, `k = top_k` and `p = top_p`, a token is drawn from

    q = softmax(z / t)                      t = 0: the token with the largest logit
    the k largest of q, the others set to 0
    the smallest set of the largest of those whose sum is at least p of their total (nucleus)

renormalised. Nucleus sampling: Holtzman et al., 2020, arXiv:1904.09751.

The draw is a Gumbel-max in its exponential form: with independent `E_v ~ Exp(1)`, the token

    argmax_v  w_v / E_v,        w_v = exp((z_v - max z) / t)

has the distribution `w / sum(w)`, also over any subset of the tokens, so that nothing is normalised
or summed up in order to draw. A rounding error of the logits changes the token only if the two
largest quotients are as close as the error; an inverse of the cumulative distribution would move
every boundary behind the error. The numbers `E` come from Philox, a generator whose output is a
function of a key and a counter (Salmon et al., 2011, doi:10.1145/2063384.2063405): the key is
(seed, sample), the counter begins at the position. What a row draws therefore depends on nothing
else in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tinker import types
from torch import Tensor

_WORD = 2**64


@dataclass(frozen=True)
class RowChoice:
    """How the next token of one row is chosen.

    Attributes:
        params: the temperature, `top_k` and `top_p`.
        seed: of the request.
        sample: index of the sample within its request.
        position: number of tokens that the sample has so far.
    """

    params: types.SamplingParams
    seed: int
    sample: int
    position: int


class Choice(NamedTuple):
    """Chosen tokens `[N]`, their log-probs `[N]`, and the log-probs of all tokens, unnormalised.

    The log-probs are those of `softmax(z / t)`, before `top_k` and `top_p`; of `softmax(z)` at
    `t = 0`. The log-probs of all tokens in row i are `scaled[i] - log_total[i]`.
    """

    tokens: Tensor
    logprobs: Tensor
    scaled: Tensor
    log_total: Tensor


def choose_tokens(logits: Tensor, rows: Sequence[RowChoice]) -> Choice:
    """Choose a token for each row of logits `[N, V]`."""
    scaled = at_temperature(logits, [row.params.temperature for row in rows])
    weights = scaled.exp()
    total = weights.sum(-1)
    is_drawn = [row.params.temperature > 0 for row in rows]
    if all(is_drawn):
        tokens = _draw(weights, total, rows)
    else:
        # By the logits: two that differ may have the same weight.
        tokens = logits.argmax(-1)
        drawn = [index for index, yes in enumerate(is_drawn) if yes]
        if drawn:
            tokens[drawn] = _draw(weights[drawn], total[drawn], [rows[index] for index in drawn])
    log_total = total.log()
    logprobs = scaled.gather(-1, tokens[:, None])[:, 0] - log_total
    return Choice(tokens, logprobs, scaled, log_total)


def at_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Differences `(z - max z) / t` of logits `[N, V]`, with `t = 1` in place of 0.

    The largest logit is subtracted before the division, so that a tiny temperature overflows to
    minus infinity for the others, and never to NaN.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    if any(temperature not in (0, 1) for temperature in temperatures):
        # Within the range of the dtype: neither 0 / 0 nor an infinite quotient of infinities.
        limits = torch.finfo(logits.dtype)
        divisors = [min(max(t, limits.tiny), limits.max) if t > 0 else 1.0 for t in temperatures]
        shifted /= torch.tensor(divisors, dtype=logits.dtype, device=logits.device)[:, None]
    return shifted


def _draw(weights: Tensor, total: Tensor, rows: Sequence[RowChoice]) -> Tensor:
    noise = exponential_noise(rows, weights)
    vocabulary = weights.shape[-1]
    limited = [
        index
        for index, row in enumerate(rows)
        if 0 < row.params.top_k < vocabulary or row.params.top_p < 1
    ]
    if len(limited) == len(rows):
        return _draw_limited(weights, noise, total, rows)
    tokens: Tensor = (weights / noise).argmax(-1)
    if limited:
        tokens[limited] = _draw_limited(
            weights[limited], noise[limited], total[limited], [rows[index] for index in limited]
        )
    return tokens


def _draw_limited(
    weights: Tensor, noise: Tensor, total: Tensor, rows: Sequence[RowChoice]
) -> Tensor:
    """Draw under top-k and top-p, by selecting the largest weights, as few as possible."""
    vocabulary, device = weights.shape[-1], weights.device
    top_k = torch.tensor(
        [min(row.params.top_k, vocabulary) if row.params.top_k > 0 else vocabulary for row in rows],
        device=device,
    )
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64, device=device)
    has_k = top_k < vocabulary
    # Without top-k: all tokens with a share below (1 - p) / V have less than 1 - p together, so
    # that the nucleus is among the others.
    smallest = ((1 - top_p) / vocabulary * total).to(weights.dtype)
    candidates = (weights >= smallest[:, None]).sum(-1)
    values, ids = weights.topk(int(torch.where(has_k, top_k, candidates).max()), dim=-1)
    rank = torch.arange(values.shape[-1], device=device)
    mass = values.double().masked_fill(rank >= top_k[:, None], 0)
    # Keep token i while the mass before it is below p of the total: the token that crosses p stays,
    # and the first always does. Without top-k the total includes the tokens not selected.
    whole = torch.where(has_k, mass.sum(-1), total.double())
    before = mass.cumsum(-1) - mass
    is_kept = (mass > 0) & (before < (top_p * whole)[:, None])
    race = (values / noise.gather(-1, ids)).masked_fill(~is_kept, -1)
    chosen: Tensor = ids.gather(-1, race.argmax(-1, keepdim=True))[:, 0]
    return chosen


def exponential_noise(rows: Sequence[RowChoice], like: Tensor) -> Tensor:
    """Independent standard exponential numbers `[N, V]`, of the shape and the dtype of `like`.

    On a CPU they are `-log(1 - u)` of `u = (bits + 1/2) / 2**32`, so that small ones, which decide,
    have the resolution of 32 bits. A GPU has its own Philox, seeded for each row by ours.
    """
    if like.device.type != "cpu":
        noise = torch.empty_like(like)
        generator = torch.Generator(like.device)
        for row, values in zip(rows, noise, strict=True):
            generator.manual_seed(int(_philox(row).random_raw()))
            values.exponential_(generator=generator)
        return noise
    vocabulary = like.shape[-1]
    bits = np.empty((len(rows), vocabulary), np.float64 if like.dtype == torch.float64 else "f4")
    for index, row in enumerate(rows):
        words = _philox(row).random_raw((vocabulary + 1) // 2)
        bits[index] = words.view(np.uint32)[:vocabulary]
    # Below 1 in float32 too: the logarithm of 0 would exclude a token.
    uniform = torch.from_numpy(bits).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _philox(row: RowChoice) -> np.random.Philox:
    # Philox counts up from the lowest word of its counter: 2**64 blocks for each position.
    key = np.array([row.seed % _WORD, row.sample], np.uint64)  # a list would become floats
    return np.random.Philox(key=key, counter=[0, row.position, 0, 0])
