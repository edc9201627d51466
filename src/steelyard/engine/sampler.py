"""Sampling from a model, many requests at a time; runs on the worker thread.

All samples that are being written share one batch. Between two tokens, samples that have ended
leave it and others take their rows (continuous batching). What a sample gets does not depend on the
others, but for the rounding of the model's arithmetic: see `token_choice` and `decoding`.

The log-probs of a sample are those of `q = softmax(z / t)`, before `top_k` and `top_p`: the
difference of two of them is `1 / t` times what it is at `t = 1`, as tinker-cookbook's
`validate_temperature_logprobs.py` expects. At `t = 0` they are those of `softmax(z)`: the limit of
`q` is one token with the log-prob 0, which says nothing.
"""

from __future__ import annotations

import secrets
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from tinker import types
from tinker.types.topk_logprobs import MASK_LOGPROB, TopkLogprobs
from torch import Tensor

from steelyard.engine.adapter import Adapter
from steelyard.engine.decoding import DecodingBatch, Prefix
from steelyard.engine.model import Model
from steelyard.engine.token_choice import Choice, RowChoice, StopCondition, choose_tokens
from steelyard.engine.worker_thread import Arrivals
from steelyard.errors import InputError
from steelyard.spec.checks import is_finite, is_whole

# Of a call. A billion of them would fill the memory before the first one is drawn.
MAX_SAMPLES = 4096
# Most rows of a batch, by device; and most bytes of its cache, if every row grew to its limit.
# Constants, not measured: what is batched together must be the same when a run is resumed.
_CPU_ROWS, _GPU_ROWS = 64, 256
_CACHE_BYTES = 4 * 2**30


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


@dataclass(frozen=True)
class SamplingRequest:
    """A checked request: `count` continuations of a prompt `[T]`."""

    prompt: Tensor
    count: int
    params: types.SamplingParams
    requested: RequestedLogprobs = field(default_factory=RequestedLogprobs)


class TokenSampler:
    """Samples from a model with an adapter, or from the base model if the adapter is None."""

    def __init__(self, model: Model, adapter: Adapter | None) -> None:
        self.model = model
        self._adapter = adapter

    @property
    def batch_key(self) -> str:
        """Name of the weights: requests of the same can share a batch."""
        return "base model" if self._adapter is None else f"adapter {self._adapter.name}"

    def run_batch(self, arrivals: Arrivals[SamplingRequest, types.SampleResponse]) -> None:
        """Sample for requests as they arrive, until there is none."""
        batch = _SampleBatch(self.model, self._adapter)
        while True:
            for request, future in arrivals.take():
                try:
                    batch.add(request, future.set_result)
                except Exception as error:  # noqa: BLE001 - of this request alone
                    future.set_exception(error)
            if not batch:
                return
            batch.step()

    def sample(self, requests: Sequence[SamplingRequest]) -> list[types.SampleResponse]:
        """Sample for a list of requests; what is batched together depends on the list alone."""
        batch = _SampleBatch(self.model, self._adapter)
        responses: dict[int, types.SampleResponse] = {}
        for index, request in enumerate(requests):
            batch.add(request, partial(responses.__setitem__, index))
        while batch:
            batch.step()
        return [responses[index] for index in range(len(requests))]

    def stream(self, request: SamplingRequest) -> Iterator[int]:
        """Tokens of one sample, each computed when it is asked for."""
        batch = _SampleBatch(self.model, self._adapter)
        (sample,) = batch.add(request, lambda _: None)
        while batch:
            batch.step()
            yield sample.tokens[-1]

    @torch.inference_mode()
    def logprobs(self, prompt: Tensor, last_n: int | None) -> list[float | None]:
        """Log-prob of each token of a prompt; None for the first, and for all before the last n."""
        tokens = prompt[None].to(self.model.device)
        logits = self.model(self._adapter, input_ids=tokens, use_cache=False).logits[0].cpu()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        by_token = _prompt_logprobs(prompt, logits.log_softmax(-1), last_n)
        return [None if np.isnan(value) else float(value) for value in by_token]


@dataclass(eq=False)
class _Job:
    """A request in a batch, with what is known of its response so far."""

    request: SamplingRequest
    seed: int
    limit: int
    finish: Callable[[types.SampleResponse], object]
    samples: list[_Sample] = field(default_factory=list)
    fields: dict[str, Any] | None = None
    ended: int = 0

    @cached_property
    def key(self) -> bytes:
        """Equal for equal prompts."""
        return self.request.prompt.numpy().tobytes()


@dataclass(eq=False)
class _Sample:
    job: _Job
    index: int
    ends: StopCondition
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stop_reason: types.StopReason | None = None

    def choice(self) -> RowChoice:
        return RowChoice(self.job.request.params, self.job.seed, self.index, len(self.tokens))

    def add(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.ends.add(token):
            self.stop_reason = "stop"
        elif len(self.tokens) == self.job.limit:
            self.stop_reason = "length"


class _SampleBatch:
    """Samples that wait, and samples that are being written; true while there are any."""

    def __init__(self, model: Model, adapter: Adapter | None) -> None:
        self._model = model
        self._decoding = DecodingBatch(model, adapter)
        self._max_rows = _CPU_ROWS if model.device.type == "cpu" else _GPU_ROWS
        self._waiting: deque[_Sample] = deque()
        self._rows: list[_Sample] = []
        self._logits: Tensor | None = None  # of the rows' next tokens, [N, V]
        self._prefixes: dict[bytes, Prefix] = {}

    def __bool__(self) -> bool:
        return bool(self._rows or self._waiting)

    def add(
        self, request: SamplingRequest, finish: Callable[[types.SampleResponse], object]
    ) -> list[_Sample]:
        """Let the samples of a request wait for rows, and return them."""
        params = request.params
        seed = secrets.randbits(63) if params.seed is None else params.seed
        left = self._model.limits.context - len(request.prompt)
        limit = left if params.max_tokens is None else min(params.max_tokens, left)
        job = _Job(request, seed, limit, finish)
        job.samples = [
            _Sample(job, index, StopCondition(self._model, params.stop))
            for index in range(request.count)
        ]
        self._waiting.extend(job.samples)
        return job.samples

    @torch.inference_mode()
    def step(self) -> None:
        """Give waiting samples the free rows, and write one token of each row."""
        self._admit()
        assert self._logits is not None  # noqa: S101 - at least one row fits
        choice = choose_tokens(self._logits, [sample.choice() for sample in self._rows])
        self._record(choice)
        left = [row for row, sample in enumerate(self._rows) if sample.stop_reason is None]
        tokens = choice.tokens if len(left) == len(self._rows) else choice.tokens[left]
        self._rows = [self._rows[row] for row in left]
        self._decoding.keep(left)
        self._logits = self._decoding.advance(tokens) if left else None

    def _record(self, choice: Choice) -> None:
        pairs = zip(choice.tokens.tolist(), choice.logprobs.tolist(), strict=True)
        for row, (sample, (token, logprob)) in enumerate(zip(self._rows, pairs, strict=True)):
            number = sample.job.request.requested.topk_sample
            if number:
                values, ids = choice.scaled[row].topk(number)
                sample.top.append((ids.cpu(), (values - choice.log_total[row]).cpu()))
            sample.add(token, logprob)
            if sample.stop_reason is not None:
                sample.job.ended += 1
                if sample.job.ended == len(sample.job.samples):
                    sample.job.finish(_response(sample.job))

    def _admit(self) -> None:
        admitted = self._take_waiting() if self._waiting else []
        if not admitted:
            return
        for sample in admitted:
            job = sample.job
            if job.fields is None and job.request.requested.whole_prompt:
                self._prefixes[job.key] = self._read_prompt(job)
        prompts = {sample.job.key: sample.job.request.prompt for sample in admitted}
        fresh = {key: prompt for key, prompt in prompts.items() if key not in self._prefixes}
        prefilled = self._decoding.prefill(list(fresh.values()))
        self._prefixes.update(zip(fresh, prefilled, strict=True))
        prefixes = [self._prefixes[sample.job.key] for sample in admitted]
        self._decoding.join(prefixes)
        logits = torch.stack([prefix.logits for prefix in prefixes])
        self._logits = logits if self._logits is None else torch.cat([self._logits, logits])
        self._rows += admitted
        still_needed = {sample.job.key for sample in self._waiting}
        self._prefixes = {k: p for k, p in self._prefixes.items() if k in still_needed}

    def _take_waiting(self) -> list[_Sample]:
        """Waiting samples that fit beside the rows, in order; at least one if there are no rows."""
        admitted: list[_Sample] = []
        longest = max(map(_final_length, self._rows), default=0)
        while self._waiting:
            sample = self._waiting[0]
            rows = len(self._rows) + len(admitted)
            longest = max(longest, _final_length(sample))
            cache_bytes = (rows + 1) * longest * self._model.cache_bytes
            if rows and (rows >= self._max_rows or cache_bytes > _CACHE_BYTES):
                break
            if rows and not (self._model.supports_padding or self._in_step(sample, admitted)):
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _in_step(self, sample: _Sample, admitted: Sequence[_Sample]) -> bool:
        """True if its row has the length of all others at every token."""
        return not self._rows and sample.job.key == admitted[0].job.key

    def _read_prompt(self, job: _Job) -> Prefix:
        prefix, logits = self._decoding.prefill_whole(job.request.prompt)
        job.fields = _prompt_fields(job.request, logits.cpu(), job.seed)
        return prefix


def _final_length(sample: _Sample) -> int:
    return len(sample.job.request.prompt) + sample.job.limit


def check_sampling(params: types.SamplingParams, count: int) -> None:
    """Check the settings of a sampling call.

    Raises:
        InputError: a setting breaks a rule.
    """
    rules = {
        f"num_samples must be a whole number from 1 to {MAX_SAMPLES}": (
            is_whole(count, at_least=1) and count <= MAX_SAMPLES,
            count,
        ),
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


def _response(job: _Job) -> types.SampleResponse:
    return types.SampleResponse(
        sequences=[_sequence(sample) for sample in job.samples], **(job.fields or {})
    )


def _sequence(sample: _Sample) -> types.SampledSequence:
    top = None
    if sample.top:
        ids, values = (torch.stack(column).numpy() for column in zip(*sample.top, strict=True))
        top = TopkLogprobs(ids.astype(np.int32), values.astype(np.float32))
    return types.SampledSequence(
        stop_reason=sample.stop_reason or "length",
        sequence_id=uuid.uuid4().hex,
        tokens_np=np.array(sample.tokens, dtype=np.int32),
        logprobs_np=np.array(sample.logprobs, dtype=np.float32),
        topk_logprobs_np=top,
    )


def _prompt_fields(request: SamplingRequest, logits: Tensor, seed: int) -> dict[str, Any]:
    """Fields of a response that are about its prompt.

    All log-probs are those of `softmax(z)`, whatever the temperature of the samples.

    Args:
        request: the prompt `[T]`, and the fields that are requested.
        logits: of the prompt, `[T, V]`, on the CPU.
        seed: of the alternatives, which are drawn at the temperature of the request.
    """
    prompt, requested = request.prompt, request.requested
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
        chosen = logprobs[:-1].gather(-1, requested.targets.clamp_min(0))
        values = torch.where(is_token, chosen, torch.zeros_like(chosen))
        fields["target_prompt_logprobs"] = types.TensorData.from_torch(values.float())
    if requested.alternatives:
        temperature = request.params.temperature
        ids = _alternatives(logits[:-1], requested.alternatives, temperature, seed)
        fields["prompt_alt_tokens"] = types.PromptAltTokens(
            tokens=types.TensorData.from_torch(ids),
            logprobs=types.TensorData.from_torch(logprobs[:-1].gather(-1, ids).float()),
        )
    return fields


def _prompt_logprobs(
    prompt: Tensor, logprobs: Tensor, last_n: int | None
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Log-prob of each token of a prompt; NaN for the first, and for all before the last n.

    Args:
        prompt: its tokens, `[T]`.
        logprobs: of all tokens at each of its positions, `[T, V]`.
        last_n: the number of tokens with a log-prob; None: all.
    """
    by_token = np.full(len(prompt), np.nan, dtype=np.float32)
    first = _first_index(prompt, last_n)
    by_token[first:] = logprobs[:-1].gather(-1, prompt[1:, None])[first - 1 :, 0].numpy()
    return by_token


def _alternatives(logits: Tensor, number: int, temperature: float, seed: int) -> Tensor:
    """Tokens `[T, number]` drawn with replacement at each position, by the temperature alone."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand(-1, number)
    shifted = logits.double() - logits.amax(-1, keepdim=True)
    probs = (shifted / temperature).softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(probs, number, replacement=True, generator=generator)


def _first_index(prompt: Tensor, last_n: int | None) -> int:
    """Index of the first token with a log-prob: never 0, which has no context to predict it."""
    return 1 if last_n is None else max(1, len(prompt) - last_n)
