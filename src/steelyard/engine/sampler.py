"""Sampling of tokens from a model, and log-probs of a prompt; runs on the worker thread.

With logits `z`, a temperature `t`, `k = top_k` and `p = top_p`, a token is drawn from

    q = softmax(z / t)                      t = 0: the token with the largest logit
    the k largest of q, the others set to 0
    the smallest set of the largest of those whose sum is at least p of their total (nucleus)

renormalised. Nucleus sampling: Holtzman et al., 2020, arXiv:1904.09751.

The log-probs of a sample are those of `q = softmax(z / t)`, before `top_k` and `top_p`: the
difference of two of them is `1 / t` times what it is at `t = 1`, as tinker-cookbook's
`validate_temperature_logprobs.py` expects. At `t = 0` they are those of `softmax(z)`: the limit of
`q` is one token with the log-prob 0, which says nothing. All log-probs of a prompt are those of
`softmax(z)`, whatever the temperature.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tinker import types
from tinker.types.topk_logprobs import MASK_LOGPROB, TopkLogprobs
from torch import Tensor
from transformers import DynamicCache

from steelyard.engine.adapter import Adapter
from steelyard.engine.model import Model
from steelyard.errors import InputError
from steelyard.spec import is_finite, is_whole


@dataclass(frozen=True)
class RequestedLogprobs:
    """Log-probs that a sampling call requests beside the samples and their own.

    Attributes:
        prompt_logprobs: whether the log-probs of the prompt's own tokens are requested.
        last_n: limits them to the last n tokens; None: all.
        topk_prompt: number of the likeliest tokens at each position of the prompt.
        topk_sample: number of the likeliest tokens at each position of a sample.
        targets: chosen tokens at each position of the prompt, `[T - 1, K]`, -1 for none.
        alternatives: number of tokens drawn at each position of the prompt.
    """

    prompt_logprobs: bool = False
    last_n: int | None = None
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: Tensor | None = None
    alternatives: int = 0

    @property
    def whole_prompt(self) -> bool:
        """True if the logits at every position of the prompt are needed, not at the last alone."""
        return bool(
            self.prompt_logprobs
            or self.topk_prompt
            or self.alternatives
            or self.targets is not None
        )


@dataclass
class _Sample:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    reason: types.StopReason | None = None


class TokenSampler:
    """Samples from a model with an adapter, or from the base model if the adapter is None."""

    def __init__(self, model: Model, adapter: Adapter | None) -> None:
        self.model = model
        self._adapter = adapter

    @torch.inference_mode()
    def sample(
        self, prompt: Tensor, count: int, params: types.SamplingParams, requested: RequestedLogprobs
    ) -> types.SampleResponse:
        """Sample `count` continuations of `prompt`, as one batch with a key-value cache."""
        model, length = self.model, len(prompt)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        generator = torch.Generator().manual_seed(seed)
        cache = DynamicCache(config=model.config)
        keep = 0 if requested.whole_prompt else 1
        logits = self._logits(prompt[None], cache, keep=keep)
        prompt_fields = self._prompt_fields(prompt, logits[0], params, requested, generator)
        left = model.limits.context - length
        limit = left if params.max_tokens is None else min(params.max_tokens, left)
        is_end = _StopCondition(model, params.stop)
        samples = [_Sample() for _ in range(count)]
        # Samples that have not ended; row i of the batch is sample active[i].
        active = list(range(count))
        if count > 1:
            cache.batch_repeat_interleave(count)
        rows = logits[:, -1].expand(count, -1)
        for position in range(limit):
            logprobs = at_temperature(rows, params.temperature)
            # One number for every sample, ended or not, so that what a sample draws does not depend
            # on where the others end.
            draws = torch.rand(count, generator=generator)[active]
            tokens = choose_tokens(rows, params, draws)
            for row, index in enumerate(active):
                sample, token = samples[index], int(tokens[row])
                sample.tokens.append(token)
                sample.logprobs.append(logprobs[row, token].item())
                if requested.topk_sample:
                    values, ids = logprobs[row].topk(requested.topk_sample)
                    sample.top.append((ids, values))
                sample.reason = "stop" if is_end(sample.tokens) else None
            unfinished = [row for row, index in enumerate(active) if samples[index].reason is None]
            if not unfinished or position + 1 == limit:
                break
            if len(unfinished) < len(active):
                cache.batch_select_indices(torch.tensor(unfinished, device=model.device))
            active = [active[row] for row in unfinished]
            rows = self._logits(tokens[unfinished][:, None], cache, keep=1)[:, -1]
        return types.SampleResponse(
            sequences=[_sequence(sample, requested) for sample in samples], **prompt_fields
        )

    @torch.inference_mode()
    def logprobs(self, prompt: Tensor, last_n: int | None) -> list[float | None]:
        """Log-prob of each token of a prompt; None for the first, and for all before the last n."""
        logits = self._logits(prompt[None], None, keep=0)[0]
        found = _prompt_logprobs(prompt, logits.log_softmax(-1), last_n)
        return [None if np.isnan(value) else float(value) for value in found]

    def _logits(self, tokens: Tensor, cache: DynamicCache | None, *, keep: int) -> Tensor:
        """Logits `[N, keep, V]` on the CPU, at the last `keep` positions, or at all for 0."""
        output = self.model(
            self._adapter,
            input_ids=tokens.to(self.model.device),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        logits: Tensor = output.logits.cpu()
        return logits if logits.dtype == torch.float64 else logits.float()

    def _prompt_fields(
        self,
        prompt: Tensor,
        logits: Tensor,
        params: types.SamplingParams,
        requested: RequestedLogprobs,
        generator: torch.Generator,
    ) -> dict[str, Any]:
        """Fields of the response that are about the prompt; `logits` are its, `[T, V]`."""
        if not requested.whole_prompt:
            return {}
        logprobs = logits.log_softmax(-1)
        fields: dict[str, Any] = {}
        if requested.prompt_logprobs:
            fields["prompt_logprobs_np"] = _prompt_logprobs(prompt, logprobs, requested.last_n)
        if requested.topk_prompt:
            shape = (len(prompt), requested.topk_prompt)
            first = _first_index(prompt, requested.last_n)
            values, ids = logprobs[first - 1 : -1].topk(requested.topk_prompt)
            top = TopkLogprobs(np.zeros(shape, np.int32), np.full(shape, MASK_LOGPROB, np.float32))
            top.token_ids[first:], top.logprobs[first:] = ids.numpy(), values.numpy()
            fields["topk_prompt_logprobs_np"] = top
        if requested.targets is not None:
            is_token = requested.targets >= 0
            found = logprobs[:-1].gather(-1, requested.targets.clamp_min(0))
            values = torch.where(is_token, found, torch.zeros_like(found))
            fields["target_prompt_logprobs"] = types.TensorData.from_torch(values.float())
        if requested.alternatives:
            number = requested.alternatives
            if params.temperature == 0:
                ids = logits[:-1].argmax(-1, keepdim=True).expand(-1, number)
            else:
                probs = at_temperature(logits[:-1], params.temperature).exp()
                ids = torch.multinomial(probs, number, replacement=True, generator=generator)
            fields["prompt_alt_tokens"] = types.PromptAltTokens(
                tokens=types.TensorData.from_torch(ids),
                logprobs=types.TensorData.from_torch(logprobs[:-1].gather(-1, ids).float()),
            )
        return fields


def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs `log softmax(z / t)` of logits `[…, V]`, in float64; those of `t = 1` for `t = 0`.

    The largest logit is subtracted before the division, so that a tiny temperature overflows to
    minus infinity for the others, and never to NaN.
    """
    logits = logits.double()
    if temperature > 0:
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    return logits.log_softmax(-1)


def choose_tokens(logits: Tensor, params: types.SamplingParams, draws: Tensor) -> Tensor:
    """Tokens `[N]`, drawn by temperature, top-k and top-p, in this order.

    Args:
        logits: logits, or log-probs, `[N, V]`.
        params: the temperature, `top_k` and `top_p`.
        draws: uniform numbers in [0, 1), `[N]`.
    """
    if params.temperature == 0:
        return logits.argmax(-1)
    # Sorted once, largest first: top-k and top-p each keep a prefix. The sort is stable, so that
    # ties fall alike on every machine.
    ordered, ids = torch.sort(
        at_temperature(logits, params.temperature), dim=-1, descending=True, stable=True
    )
    probs = ordered.exp()
    if params.top_k > 0:
        probs[:, params.top_k :] = 0
    # Keep token i while the mass before it is below p of the total: the token that crosses p stays,
    # and the first always does. The total is below 1 after top-k.
    before = probs.cumsum(-1) - probs
    probs[before >= params.top_p * probs.sum(-1, keepdim=True)] = 0
    # Inverse of the cumulative distribution, scaled by the draw instead of renormalised. Float64,
    # since a float32 sum over a vocabulary would misplace its tail. A product that is rounded up to
    # the total would land behind the last token that was kept, hence the minimum.
    cumulative = probs.cumsum(-1)
    position = torch.searchsorted(
        cumulative, draws.double()[:, None] * cumulative[:, -1:], right=True
    )
    last = (probs > 0).sum(-1, keepdim=True) - 1
    chosen: Tensor = ids.gather(-1, torch.minimum(position, last))[:, 0]
    return chosen


def check_sampling(params: types.SamplingParams, count: int) -> None:
    """Check the settings of a sampling call.

    Raises:
        InputError: a setting breaks a rule.
    """
    rules = {
        "num_samples must be a whole number >= 1": (is_whole(count, at_least=1), count),
        "max_tokens must be a whole number >= 1 or None": (
            params.max_tokens is None or is_whole(params.max_tokens, at_least=1),
            params.max_tokens,
        ),
        "temperature must be a finite number >= 0": (
            is_finite(params.temperature) and params.temperature >= 0,
            params.temperature,
        ),
        "top_p must be above 0 and at most 1": (0 < params.top_p <= 1, params.top_p),
        "top_k must be a whole number >= 1, or -1 for all": (
            params.top_k == -1 or is_whole(params.top_k, at_least=1),
            params.top_k,
        ),
        "seed must be a whole number from -2**63 to 2**64 - 1, or None": (
            params.seed is None
            or (is_whole(params.seed, at_least=-(2**63)) and params.seed < 2**64),
            params.seed,
        ),
    }
    for rule, (is_kept, value) in rules.items():
        if not is_kept:
            raise InputError(f"{rule}, got {value!r}.")


class _StopCondition:
    """Tells whether the tokens so far end a sample: with an end token, or with a stop string."""

    def __init__(self, model: Model, stop: str | Sequence[str] | Sequence[int] | None) -> None:
        listed = [stop] if isinstance(stop, str) else list(stop or ())
        self._tokens = {item for item in listed if isinstance(item, int)}
        self._texts = [item for item in listed if isinstance(item, str) and item]
        if stop is None or listed:  # an empty list switches the model's own end tokens off too
            self._tokens |= model.end_tokens
        self._tokenizer = model.tokenizer if self._texts else None

    def __call__(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._tokens:
            return True
        if self._tokenizer is None:
            return False
        # Decode the last tokens only. A character has at most four bytes of UTF-8, so with one byte
        # a token four tokens a character are enough.
        window = 4 * max(map(len, self._texts)) + 4
        text = self._tokenizer.decode(tokens[-window:])
        return any(stop in text for stop in self._texts)


def _sequence(sample: _Sample, requested: RequestedLogprobs) -> types.SampledSequence:
    top = None
    if requested.topk_sample:
        ids, values = zip(*sample.top, strict=True)
        top = _topk(torch.stack(ids), torch.stack(values))
    return types.SampledSequence(
        stop_reason=sample.reason or "length",
        sequence_id=uuid.uuid4().hex,
        tokens_np=np.array(sample.tokens, dtype=np.int32),
        logprobs_np=np.array(sample.logprobs, dtype=np.float32),
        topk_logprobs_np=top,
    )


def _topk(ids: Tensor, values: Tensor) -> TopkLogprobs:
    return TopkLogprobs(ids.numpy().astype(np.int32), values.numpy().astype(np.float32))


def _prompt_logprobs(
    prompt: Tensor, logprobs: Tensor, last_n: int | None
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    found = np.full(len(prompt), np.nan, dtype=np.float32)
    first = _first_index(prompt, last_n)
    found[first:] = logprobs[:-1].gather(-1, prompt[1:, None])[first - 1 :, 0].numpy()
    return found


def _first_index(prompt: Tensor, last_n: int | None) -> int:
    """Index of the first token with a log-prob: never 0, which has no context to predict it."""
    return 1 if last_n is None else max(1, len(prompt) - last_n)
