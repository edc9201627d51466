"""Choice of the next token of each row of a batch, by noise that belongs to that row alone.

With logits `z`, a temperature `t`, `k = top_k` and `p = top_p`, a token is drawn from

    q = softmax(z / t)                      t = 0: the token with the largest logit
    the k largest of q, the others set to 0
    the smallest set of the largest of those whose sum is at least p of their total (nucleus)

renormalised. Nucleus sampling: Holtzman et al., 2020, arXiv:1904.09751. In the nucleus, tokens of
equal weight are taken in the order of their indices.

The draw is a Gumbel-max in its exponential form: with independent `E_v ~ Exp(1)`, the token

    argmax_v  w_v / E_v,        w_v = exp((z_v - max z) / t)

has the distribution `w / sum(w)`, also over any subset of the tokens, so that nothing is normalised
or summed up in order to draw. A rounding error of the logits changes the token only if the two
largest quotients are as close as the error; an inverse of the cumulative distribution would move
every boundary behind the error. The numbers `E` come from Philox, a generator whose output is a
function of a key and a counter (Salmon et al., 2011, doi:10.1145/2063384.2063405): the key is
(seed, sample), the counter begins at the position. What a row draws therefore depends on nothing
else in the batch. `StopCondition` decides whether a token ends its sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tinker import types
from torch import Tensor

from steelyard.engine.model import Model

_WORD = 2**64
# A character has at most four bytes of UTF-8, and a token has at least one of them.
_LONGEST_CHARACTER = 4
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class RowChoice:
    """Settings and noise by which the next token of one row is chosen.

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
    race = weights / exponential_noise(rows, weights)
    tokens: Tensor = race.argmax(-1)
    params, vocabulary = [row.params for row in rows], weights.shape[-1]
    top_k = [index for index, own in enumerate(params) if 0 < own.top_k < vocabulary]
    top_p = [index for index, own in enumerate(params) if own.top_p < 1 and index not in top_k]
    if top_k:
        tokens[top_k] = _draw_top_k(weights[top_k], race[top_k], [params[i] for i in top_k])
    if top_p:
        shares = torch.tensor(
            [params[index].top_p for index in top_p], dtype=weights.dtype, device=weights.device
        )
        # Not copied if all rows have a top_p, as is usual.
        some = slice(None) if len(top_p) == len(rows) else top_p
        # Above 0, so that the first token is always below it.
        limit = (shares * total[some]).clamp_min(torch.finfo(weights.dtype).tiny)
        tokens[some] = _draw_top_p(weights[some], race[some], tokens[some], limit)
    return tokens


def _draw_top_k(weights: Tensor, race: Tensor, params: Sequence[types.SamplingParams]) -> Tensor:
    """Winners of the race among the k largest weights, and in the nucleus of these."""
    top_k = torch.tensor([[own.top_k] for own in params], device=weights.device)
    top_p = torch.tensor([[own.top_p] for own in params], device=weights.device)
    values, ids = weights.topk(int(top_k.max()), dim=-1)
    mass = values.double()
    mass[torch.arange(values.shape[-1], device=weights.device) >= top_k] = 0
    # Keep token i while the mass before it is below p of the total: the token that crosses p stays,
    # and the first always does.
    before = mass.cumsum(-1) - mass
    is_out = (mass == 0) | (before >= top_p * mass.sum(-1, keepdim=True))
    winners = race.gather(-1, ids).masked_fill_(is_out, -1).argmax(-1, keepdim=True)
    chosen: Tensor = ids.gather(-1, winners)[:, 0]
    return chosen


def _draw_top_p(weights: Tensor, race: Tensor, tokens: Tensor, limit: Tensor) -> Tensor:
    """Winners of the race in the nucleus, without finding the nucleus.

    In the order of the weights, largest first and equal ones by index, a token is in the nucleus if
    the mass before it is below `limit`, p of the total `[N]`. If the winner of all, in `tokens`,
    is there, it is the winner of the nucleus. If not, no token behind it is there either, and the
    race goes on among those before it: seldom for many rounds, as a winner is in the nucleus with a
    probability of p.
    """
    ids = torch.arange(weights.shape[-1], device=weights.device)
    tokens = tokens.clone()
    rows = torch.arange(len(weights), device=weights.device)
    while True:
        weight = weights.gather(-1, tokens[rows, None])
        # An upper bound of the mass before the winner, which settles most rows in one comparison:
        # it counts tokens of its weight on both sides.
        bound = torch.where(weights >= weight, weights, 0).sum(-1) - weight[:, 0]
        is_open = bound >= limit
        if not is_open.any():
            return tokens
        rows, weights, limit, race = (of_row[is_open] for of_row in (rows, weights, limit, race))
        winner, weight = tokens[rows, None], weight[is_open]
        is_before = (weights > weight) | ((weights == weight) & (ids < winner))
        race.masked_fill_(~is_before, -1)
        is_out = torch.where(is_before, weights, 0).sum(-1) >= limit
        rows, weights, limit, race = (of_row[is_out] for of_row in (rows, weights, limit, race))
        tokens[rows] = race.argmax(-1)


def exponential_noise(rows: Sequence[RowChoice], like: Tensor) -> Tensor:
    """Independent standard exponential numbers `[N, V]`, of the shape and the dtype of `like`.

    They are `-log(1 - u)` of `u = bits / 2**32`, so that small ones, which decide, have the
    resolution of 32 bits.
    """
    if like.device.type != "cpu":
        return device_noise(rows, like)
    vocabulary = like.shape[-1]
    bits = np.empty((len(rows), vocabulary), np.float64 if like.dtype == torch.float64 else "f4")
    for index, row in enumerate(rows):
        words = _philox(row).random_raw((vocabulary + 1) // 2)
        bits[index] = words.view(np.uint32)[:vocabulary]
    # Above 0, and below 1 in float32 too: an infinite quotient or the logarithm of 0 would decide.
    noise = torch.from_numpy(bits).clamp_(0.5, 2.0**32 - 2.0**8)
    return noise.mul_(-(2.0**-32)).log1p_().neg_()


def device_noise(rows: Sequence[RowChoice], like: Tensor) -> Tensor:
    """Numbers as those of `exponential_noise`, from the device's own generator, seeded by Philox.

    A GPU's generator is a Philox too, but it gives other numbers than ours with the same seed.
    """
    noise = torch.empty_like(like)
    generator = torch.Generator(like.device)
    for row, values in zip(rows, noise, strict=True):
        generator.manual_seed(int(_philox(row).random_raw()))
        values.exponential_(generator=generator)
    return noise


def _philox(row: RowChoice) -> np.random.Philox:
    # Philox counts up from the lowest word of its counter: 2**64 blocks for each position.
    key = np.array([row.seed % _WORD, row.sample], np.uint64)  # a list would become floats
    return np.random.Philox(key=key, counter=[0, row.position, 0, 0])


class StopCondition:
    """Decides after each token of one sample whether it ends there.

    Args:
        model: the model, for its end tokens and its tokenizer.
        stop: stop strings or end tokens of the request. None: the model's own end tokens; an empty
            list switches these off.
    """

    def __init__(self, model: Model, stop: str | Sequence[str] | Sequence[int] | None) -> None:
        listed = [stop] if isinstance(stop, str) else list(stop or ())
        self._tokens = {item for item in listed if isinstance(item, int)}
        if stop is None or listed:
            self._tokens |= model.end_tokens
        texts = [item for item in listed if isinstance(item, str) and item]
        self._text = _StopStrings(model.tokenizer, texts) if texts else None

    def add(self, token: int) -> bool:
        """True if the sample ends with this token."""
        ends_text = self._text is not None and self._text.add(token)
        return ends_text or token in self._tokens


class _StopStrings:
    """Search of the text of a sample for strings, decoding each token about twice.

    A token alone does not decode as it does within a text: decoders drop the space of the first
    token, and a character may have several tokens. So the text of new tokens is what decoding
    adds to that of the tokens before them, which begin with the last complete character's.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._decode = tokenizer.decode
        self._texts = texts
        # Characters that may begin a stop string whose end is still to come.
        self._overlap = max(map(len, texts)) - 1
        self._tail = ""
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def add(self, token: int) -> bool:
        self._pending.append(token)
        text = self._tail + self._decode(self._context + self._pending)[len(self._context_text) :]
        if any(stop in text for stop in self._texts):
            return True
        # Bytes that never become a character are not waited for longer than one takes.
        if not text.endswith(_INCOMPLETE) or len(self._pending) >= _LONGEST_CHARACTER:
            self._tail = text[-self._overlap :] if self._overlap else ""
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
        return False
