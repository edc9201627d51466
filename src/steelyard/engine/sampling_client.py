"""`LocalSamplingClient`: the methods of the SDK's sampling client, on a model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from tinker import types
from torch import Tensor

from steelyard.engine.adapter import Adapter
from steelyard.engine.datum_tensors import DatumLimits, read_prompt
from steelyard.engine.sampler import (
    RequestedLogprobs,
    SamplingRequest,
    TokenSampler,
    check_sampling,
)
from steelyard.engine.worker_thread import WorkerThread, async_form, at_once
from steelyard.errors import InputError
from steelyard.spec.checks import is_whole


class LocalSamplingClient:
    """Samples from trained weights or from the base model; made by methods of the other clients.

    Example:
        >>> from tinker import types
        >>> from steelyard.engine import LocalServiceClient
        >>> sampling = LocalServiceClient().create_sampling_client(base_model="tiny-random")
        >>> prompt = types.ModelInput.from_ints([1, 2, 3])
        >>> params = types.SamplingParams(max_tokens=4, seed=0)
        >>> response = sampling.sample(prompt, num_samples=2, sampling_params=params).result()
        >>> [len(sequence.tokens) for sequence in response.sequences]
        [4, 4]
    """

    def __init__(self, worker: WorkerThread, adapter: Adapter | None) -> None:
        self._worker = worker
        self._sampler = TokenSampler(worker.model, adapter)
        if adapter is not None:
            # Owned by the sampler, not by this client: queued calls refer to the sampler, and may
            # outlive the client.
            worker.remove_with(self._sampler, adapter)

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> Future[types.SampleResponse]:
        """Sample continuations of a prompt, as the SDK's `SamplingClient.sample` does.

        The log-probs of the sampled tokens are those at the temperature, before `top_k` and
        `top_p`; at temperature 0 they are those at 1. The log-probs of the prompt are those at 1 in
        any case. `topk_prompt_logprobs` includes `include_prompt_logprobs`. The tokens of a sample
        include the stop sequence that ended it.

        Raises:
            InputError: the prompt or a setting breaks a rule.
        """
        limits = self._worker.model.limits
        request = self._read_request(prompt, num_samples, sampling_params)
        for name, value in (
            ("topk_prompt_logprobs", topk_prompt_logprobs),
            ("topk_sample_logprobs", topk_sample_logprobs),
            ("prompt_alt_tokens_k", prompt_alt_tokens_k),
        ):
            if not is_whole(value, at_least=0) or value > limits.vocabulary:
                raise InputError(
                    f"{name} must be a whole number from 0 to the vocabulary's "
                    f"{limits.vocabulary}, got {value!r}."
                )
        _check_last_n(prompt_logprobs_last_n, len(request.prompt))
        with_prompt = bool(include_prompt_logprobs or topk_prompt_logprobs)
        if prompt_logprobs_last_n is not None and not with_prompt:
            raise InputError("prompt_logprobs_last_n needs include_prompt_logprobs=True.")
        targets = None
        if target_prompt_logprobs is not None:
            targets = target_prompt_logprobs.to_torch(pad_value=-1)
            _check_targets(targets, len(request.prompt), limits)
        requested = RequestedLogprobs(
            with_prompt,
            prompt_logprobs_last_n,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            targets,
            prompt_alt_tokens_k,
        )
        sampler = self._sampler
        return self._worker.submit_request(
            sampler.run_batch,
            sampler.batch_key,
            replace(request, requested=requested),
        )

    def sample_list(
        self, requests: Sequence[tuple[types.ModelInput, int, types.SamplingParams]]
    ) -> Future[list[types.SampleResponse]]:
        """Sample for a list of requests, as one call: for loops that must be reproducible.

        `sample` batches whatever requests wait at the moment, and on a CPU in float32 the company
        of a request moves its log-probs by about 1e-5. Here the list alone decides what is batched:
        with seeds, the same list on the same weights gives the same bits. The responses have the
        order of the requests.

        Args:
            requests: prompt, number of samples and parameters of each, as `sample` takes them.

        Raises:
            InputError: a request breaks a rule.

        Example:
            >>> from tinker import types
            >>> from steelyard.engine import LocalServiceClient
            >>> sampling = LocalServiceClient().create_sampling_client(base_model="tiny-random")
            >>> params = types.SamplingParams(max_tokens=4, seed=0)
            >>> prompts = [types.ModelInput.from_ints(tokens) for tokens in ([1, 2, 3], [4])]
            >>> responses = sampling.sample_list([(prompt, 2, params) for prompt in prompts])
            >>> [len(response.sequences) for response in responses.result()]
            [2, 2]
        """
        checked = []
        for index, request in enumerate(requests):
            try:
                checked.append(self._read_request(*request))
            except InputError as error:
                raise InputError(f"request {index}: {error}") from error
        return self._worker.submit(self._sampler.sample, checked).future()

    def stream(
        self, prompt: types.ModelInput, sampling_params: types.SamplingParams
    ) -> Iterator[int]:
        """Sample one continuation, and yield its tokens as they are chosen.

        Each token is a call of its own on the worker thread: several streams take turns, and one
        that is abandoned costs nothing more.

        Raises:
            InputError: the prompt or a setting breaks a rule.

        Example:
            >>> from tinker import types
            >>> from steelyard.engine import LocalServiceClient
            >>> sampling = LocalServiceClient().create_sampling_client(base_model="tiny-random")
            >>> prompt = types.ModelInput.from_ints([1, 2, 3])
            >>> params = types.SamplingParams(max_tokens=4, seed=0)
            >>> streamed = list(sampling.stream(prompt, params))
            >>> streamed == sampling.sample(prompt, 1, params).result().sequences[0].tokens
            True
        """
        tokens = self._sampler.stream(self._read_request(prompt, 1, sampling_params))
        # The generator runs on the worker thread, which owns the model.
        return iter(lambda: self._worker.submit(next, tokens, None).result(), None)

    def _read_request(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> SamplingRequest:
        limits = self._worker.model.limits
        tokens = read_prompt(prompt, limits)
        check_sampling(sampling_params, num_samples)
        if len(tokens) == limits.context:
            raise InputError(
                f"prompt must leave room for at least one token, and it fills the model's "
                f"context of {limits.context}."
            )
        return SamplingRequest(tokens, num_samples, sampling_params)

    sample_async = async_form(sample)
    """Await `sample`."""

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Future[list[float | None]]:
        """Log-prob of each token of a prompt; None for the first, which has no context.

        Raises:
            InputError: the prompt breaks a rule.
        """
        tokens = read_prompt(prompt, self._worker.model.limits)
        _check_last_n(prompt_logprobs_last_n, len(tokens))
        return self._worker.submit(self._sampler.logprobs, tokens, prompt_logprobs_last_n).future()

    compute_logprobs_async = async_form(compute_logprobs)
    """Await `compute_logprobs`."""

    def get_tokenizer(self) -> Any:
        """Tokenizer of the base model."""
        return self._worker.model.tokenizer

    def get_base_model(self) -> str:
        """Name of the base model."""
        return self._worker.model.source.name

    get_base_model_async = at_once(get_base_model)
    """`get_base_model`, called from an event loop."""


def _check_targets(targets: Tensor, length: int, limits: DatumLimits) -> None:
    what = "target_prompt_logprobs"
    if targets.dim() != 2 or len(targets) != length - 1:  # noqa: PLR2004 - [T - 1, K]
        raise InputError(
            f"{what} must have the shape [len(prompt) - 1, K] = [{length - 1}, K], "
            f"got {list(targets.shape)}."
        )
    if targets.is_floating_point():
        raise InputError(f"{what} must be whole numbers (int64), got {targets.dtype}.")
    outside = targets[(targets < -1) | (targets >= limits.vocabulary)]
    if len(outside):
        raise InputError(
            f"{what} must hold tokens from 0 to {limits.vocabulary - 1}, the model's vocabulary, "
            f"or -1 for none, got {outside[0].item()}."
        )


def _check_last_n(last_n: int | None, length: int) -> None:
    if last_n is not None and not (is_whole(last_n, at_least=1) and last_n < length):
        raise InputError(
            f"prompt_logprobs_last_n must be a whole number from 1 to {length - 1}, one less than "
            f"the prompt has tokens, or None, got {last_n!r}."
        )
