"""Sampling tokens from a model, and the log-probs of a prompt. Runs on the engine's thread."""

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
class Wanted:
    """What a sampling call asks for beside the samples."""

    prompt_logprobs: bool = False
    last_n: int | None = None
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: Tensor | None = None
    alternatives: int = 0

    @property
    def whole_prompt(self) -> bool:
        """Whether the distributions at every position of the prompt are needed."""
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
    """Draws from a model with an adapter, or from the base model."""

    def __init__(self, model: Model, adapter: Adapter | None) -> None:
        self.model = model
        self._adapter = adapter

    @torch.inference_mode()
    def sample(
        self, prompt: Tensor, count: int, params: types.SamplingParams, wanted: Wanted
    ) -> types.SampleResponse:
        """`count` continuations of `prompt`.

        The log-probs are the model's own, before temperature, top-k and top-p.
        """
        model, length = self.model, len(prompt)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        dice = torch.Generator().manual_seed(seed)
        cache = DynamicCache(config=model.config)
        keep = 0 if wanted.whole_prompt else 1
        logits = self._logits(prompt[None], cache, keep=keep)
        prompted = self._prompt(prompt, logits[0], params, wanted, dice)
        room = model.limits.context - length
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        stop = _Stop(model, params.stop)
        samples = [_Sample() for _ in range(count)]
        alive = list(range(count))
        if count > 1:
            cache.batch_repeat_interleave(count)
        rows = logits[:, -1].expand(count, -1)
        for position in range(limit):
            logprobs = rows.log_softmax(-1)
            # A draw for every sample, ended or not: each has its own stream of chance.
            draws = torch.rand(count, generator=dice)[alive]
            tokens = choose(logprobs, params, draws)
            for row, index in enumerate(alive):
                sample, token = samples[index], int(tokens[row])
                sample.tokens.append(token)
                sample.logprobs.append(logprobs[row, token].item())
                if wanted.topk_sample:
                    values, ids = logprobs[row].topk(wanted.topk_sample)
                    sample.top.append((ids, values))
                sample.reason = "stop" if stop(sample.tokens) else None
            going = [row for row, index in enumerate(alive) if samples[index].reason is None]
            if not going or position + 1 == limit:
                break
            if len(going) < len(alive):
                cache.batch_select_indices(torch.tensor(going, device=model.device))
            alive = [alive[row] for row in going]
            rows = self._logits(tokens[going][:, None], cache, keep=1)[:, -1]
        return types.SampleResponse(sequences=[_sequence(s, wanted) for s in samples], **prompted)

    @torch.inference_mode()
    def logprobs(self, prompt: Tensor, last_n: int | None) -> list[float | None]:
        """The log-prob of each token of the prompt; None for the first, and before the last n."""
        logits = self._logits(prompt[None], None, keep=0)[0]
        found = _prompt_logprobs(prompt, logits.log_softmax(-1), last_n)
        return [None if np.isnan(value) else float(value) for value in found]

    def _logits(self, tokens: Tensor, cache: DynamicCache | None, *, keep: int) -> Tensor:
        """The last `keep` positions' logits, all for 0."""
        given = self.model(
            self._adapter,
            input_ids=tokens.to(self.model.device),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        logits: Tensor = given.logits.cpu()
        return logits if logits.dtype == torch.float64 else logits.float()

    def _prompt(
        self,
        prompt: Tensor,
        logits: Tensor,
        params: types.SamplingParams,
        wanted: Wanted,
        dice: torch.Generator,
    ) -> dict[str, Any]:
        """The fields of a response that are about the prompt."""
        if not wanted.whole_prompt:
            return {}
        logprobs = logits.log_softmax(-1)
        fields: dict[str, Any] = {}
        if wanted.prompt_logprobs:
            fields["prompt_logprobs_np"] = _prompt_logprobs(prompt, logprobs, wanted.last_n)
        if wanted.topk_prompt:
            shape, first = (len(prompt), wanted.topk_prompt), _first(prompt, wanted.last_n)
            values, ids = logprobs[first - 1 : -1].topk(wanted.topk_prompt)
            top = TopkLogprobs(np.zeros(shape, np.int32), np.full(shape, MASK_LOGPROB, np.float32))
            top.token_ids[first:], top.logprobs[first:] = ids.numpy(), values.numpy()
            fields["topk_prompt_logprobs_np"] = top
        if wanted.targets is not None:
            known = wanted.targets >= 0
            found = logprobs[:-1].gather(-1, wanted.targets.clamp_min(0))
            values = torch.where(known, found, torch.zeros_like(found))
            fields["target_prompt_logprobs"] = types.TensorData.from_torch(values.float())
        if wanted.alternatives:
            many = wanted.alternatives
            if params.temperature == 0:
                ids = logits[:-1].argmax(-1, keepdim=True).expand(-1, many)
            else:
                spread = (logits[:-1] / params.temperature).softmax(-1)
                ids = torch.multinomial(spread, many, replacement=True, generator=dice)
            fields["prompt_alt_tokens"] = types.PromptAltTokens(
                tokens=types.TensorData.from_torch(ids),
                logprobs=types.TensorData.from_torch(logprobs[:-1].gather(-1, ids).float()),
            )
        return fields


def choose(logprobs: Tensor, params: types.SamplingParams, draws: Tensor) -> Tensor:
    """A token for each row, `[N]`, from log-probs `[N, V]` and a number in [0, 1) for each.

    Temperature first, then the k likeliest, then the likeliest that make up `top_p` together.
    Temperature 0 takes the likeliest.
    """
    if params.temperature == 0:
        return logprobs.argmax(-1)
    ordered, ids = torch.sort(logprobs / params.temperature, dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1, dtype=torch.float64)
    if params.top_k > 0:
        probs[:, params.top_k :] = 0
    before = probs.cumsum(-1) - probs
    probs[before >= params.top_p * probs.sum(-1, keepdim=True)] = 0
    reached = probs.cumsum(-1)
    place = torch.searchsorted(reached, draws.double()[:, None] * reached[:, -1:], right=True)
    last = (probs > 0).sum(-1, keepdim=True) - 1
    chosen: Tensor = ids.gather(-1, torch.minimum(place, last))[:, 0]
    return chosen


def check_sampling(params: types.SamplingParams, count: int) -> None:
    """Nothing, if one can sample so.

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
    for rule, (kept, value) in rules.items():
        if not kept:
            raise InputError(f"{rule}, got {value!r}.")


class _Stop:
    """Whether the tokens so far end a sample: at an end token, or with a stop sequence."""

    def __init__(self, model: Model, stop: str | Sequence[str] | Sequence[int] | None) -> None:
        listed = [stop] if isinstance(stop, str) else list(stop or ())
        self._tokens = {item for item in listed if isinstance(item, int)}
        self._texts = [item for item in listed if isinstance(item, str) and item]
        if stop is None or listed:  # an empty list switches the model's own ends off too
            self._tokens |= model.end_tokens
        self._tokenizer = model.tokenizer if self._texts else None

    def __call__(self, tokens: list[int]) -> bool:
        if tokens[-1] in self._tokens:
            return True
        if self._tokenizer is None:
            return False
        # A token may hold a part of a letter, but hardly fewer than one letter in four.
        window = 4 * max(map(len, self._texts)) + 4
        text = self._tokenizer.decode(tokens[-window:])
        return any(stop in text for stop in self._texts)


def _sequence(sample: _Sample, wanted: Wanted) -> types.SampledSequence:
    top = None
    if wanted.topk_sample:
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
    first = _first(prompt, last_n)
    found[first:] = logprobs[:-1].gather(-1, prompt[1:, None])[first - 1 :, 0].numpy()
    return found


def _first(prompt: Tensor, last_n: int | None) -> int:
    """The first token of the prompt that has a log-prob; nothing comes before token 0."""
    return 1 if last_n is None else max(1, len(prompt) - last_n)
