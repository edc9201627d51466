"""Endpoints that create samplers and sample from them."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Future

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from tinker import types

from steelyard.engine.sampler import MAX_SAMPLES
from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.server import codec
from steelyard.engine.server.futures import ServerFuture
from steelyard.engine.server.http_messages import STOPPING, TOO_LARGE, conflict
from steelyard.engine.server.sessions import SEQ_IDS_PER_CLONE, SamplingSession
from steelyard.engine.server.state import ServerState
from steelyard.engine.server.training_routes import check_path
from steelyard.errors import ClosedError, InputError

# Log-probs of other tokens that a request may ask for, for each token of the largest request. Each
# takes twelve bytes until the response is sent.
_OTHERS_PER_TOKEN = 64


async def create_sampling_session(
    state: ServerState, request: Request
) -> types.CreateSamplingSessionResponse:
    """Create a sampler of saved weights or of a base model."""
    body = await state.read(request, types.CreateSamplingSessionRequest)
    state.sessions.get(body.session_id)
    sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    if sampler_id not in state.samplers:
        sampler = await state.run_detached(_create_sampler(state, body, sampler_id))
        state.sessions.get(body.session_id)  # raises if it has ended meanwhile
        if sampler_id not in state.samplers:
            state.samplers.add(sampler)
    if state.get_sampler(sampler_id).payload != codec.hash_json(body):
        number = str(body.sampling_session_seq_id)
        raise conflict("sampling_session_seq_id", number, "a sampler", "one of other weights")
    return types.CreateSamplingSessionResponse(sampling_session_id=sampler_id)


async def join_sampling_session(
    state: ServerState, request: Request
) -> types.JoinSamplingSessionResponse:
    """Assign an id to a clone of a sampling client."""
    body = await state.read(request, types.JoinSamplingSessionRequest)
    sampler = state.get_sampler(body.sampling_session_id)
    sampler.clones += 1
    return types.JoinSamplingSessionResponse(client_counter=sampler.clones)


async def get_sampler(state: ServerState, request: Request) -> types.GetSamplerResponse:
    """Describe a sampler.

    The base model is named by the path of its tokenizer, as the SDK loads the tokenizer by it.
    """
    sampler = state.get_sampler(request.path_params["sampler_id"])
    base = state.models.find(sampler.base_model).tokenizer
    return types.GetSamplerResponse(
        sampler_id=sampler.sampler_id, base_model=base, model_path=sampler.model_path
    )


async def asample(state: ServerState, request: Request) -> types.UntypedAPIFuture:
    """Sample continuations of a prompt."""
    body = await state.read(request, types.SampleRequest)
    if body.sampling_session_id is None or body.seq_id is None:
        raise InputError("sampling_session_id and seq_id must be given.")
    sampler = state.get_sampler(body.sampling_session_id)
    state.sessions.touch(sampler.session_id)
    _check_size(body, state.models.find(sampler.base_model).context, state.settings.max_tokens)
    log = sampler.completions_of(body.seq_id // SEQ_IDS_PER_CLONE)
    request_id = f"{sampler.sampler_id}:{body.seq_id}"
    payload = await asyncio.to_thread(codec.hash_json, body)
    future = state.futures.get(request_id)
    if future is None:
        future = state.futures.create(request_id, "asample", sampler.session_id, payload)
        future.add_done_callback(log.add)
        await state.run_detached(_start(sampler, body, future))
    else:
        future.check_repeated("asample", payload)
    sequence_ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
    return future.reference(sequence_ids=sequence_ids)


async def _start(sampler: SamplingSession, body: types.SampleRequest, future: ServerFuture) -> None:
    try:
        client = await asyncio.shield(asyncio.wrap_future(sampler.client))
        engine_future = await asyncio.to_thread(_sample, client, body)
    except asyncio.CancelledError:
        if not sampler.client.cancelled():
            raise
        future.reject(ClosedError(STOPPING))  # before the engine had made the sampler
    except Exception as error:  # noqa: BLE001 - reported to the client
        future.reject(error)
    else:
        future.settle_from(engine_future, codec.encode_samples)


async def _create_sampler(
    state: ServerState, body: types.CreateSamplingSessionRequest, sampler_id: str
) -> SamplingSession:
    path, session_id = body.model_path, body.session_id
    if path is None and body.base_model is None:
        raise InputError("model_path or base_model must be given, got neither.")
    base = None if body.base_model is None else state.models.find(body.base_model).name

    def start() -> tuple[str, Future[LocalSamplingClient]]:
        if path is None:
            assert base is not None  # noqa: S101 - for the type checker
            return base, state.service.begin_sampling(base_model=base)
        check_path(path)
        trained = str(state.service.checkpoints.read(path).info["base_model"])
        return state.models.find(trained).name, state.service.begin_sampling(path, base)

    base_model, client = await asyncio.to_thread(start)
    payload = codec.hash_json(body)
    return SamplingSession(sampler_id, session_id, base_model, path, client, payload)


def _sample(client: LocalSamplingClient, body: types.SampleRequest) -> Future[types.SampleResponse]:
    targets = body.target_prompt_logprobs
    return client.sample(
        body.prompt,
        body.num_samples,
        body.sampling_params,
        bool(body.prompt_logprobs),
        body.topk_prompt_logprobs,
        body.topk_sample_logprobs,
        None if targets is None else _to_tensor(targets),
        body.prompt_alt_tokens_k,
        body.prompt_logprobs_last_n,
    )


def _to_tensor(fields: pydantic.BaseModel) -> types.TensorData:
    try:
        tensor = types.TensorData(**fields.model_dump())
        tensor.to_torch(pad_value=-1)  # fails if a sparse tensor is inconsistent
    except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"target_prompt_logprobs must be a whole tensor: {error}") from error
    return tensor


def _check_size(body: types.SampleRequest, context: int, max_tokens: int) -> None:
    # tokens = prompt + samples * (at most the context length each); an upper bound, checked before
    # anything is allocated. Values below 1 are rejected later, with a message of their own.
    if body.num_samples > MAX_SAMPLES:
        raise HTTPException(
            TOO_LARGE,
            f"num_samples must be a whole number from 1 to {MAX_SAMPLES}, got {body.num_samples}: "
            f"send several requests.",
        )
    requested = body.sampling_params.max_tokens
    per_sample = context if requested is None else min(max(requested, 1), context)
    tokens = body.prompt.length + max(body.num_samples, 1) * per_sample
    if tokens > max_tokens:
        raise HTTPException(
            TOO_LARGE,
            f"a request must ask for at most {max_tokens} tokens, the prompt's among them, "
            f"got {tokens}.",
        )
    # The log-probs of other tokens than those of the prompt and the samples.
    others = body.prompt.length * max(body.topk_prompt_logprobs, body.prompt_alt_tokens_k, 0)
    others += max(body.num_samples, 1) * per_sample * max(body.topk_sample_logprobs, 0)
    if others > _OTHERS_PER_TOKEN * max_tokens:
        raise HTTPException(
            TOO_LARGE,
            f"a request must ask for at most {_OTHERS_PER_TOKEN * max_tokens} log-probs of other "
            f"tokens, got {others}: lower topk_sample_logprobs, topk_prompt_logprobs, "
            f"prompt_alt_tokens_k or max_tokens.",
        )
    targets = body.target_prompt_logprobs
    if targets is not None and math.prod(targets.shape or ()) > max_tokens:
        raise HTTPException(
            TOO_LARGE, f"target_prompt_logprobs must hold at most {max_tokens} cells."
        )
