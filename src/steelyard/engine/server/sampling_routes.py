"""Requests of samplers."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import Future

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from tinker import types

from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.server import codec, http_bodies
from steelyard.engine.server.futures import ServerFuture
from steelyard.engine.server.http_errors import TOO_LARGE
from steelyard.engine.server.model_routes import check_path
from steelyard.engine.server.sampling_sessions import BLOCK, SamplingSession
from steelyard.engine.server.state import ServerState
from steelyard.errors import InputError


async def create_sampling_session(desk: ServerState, request: Request) -> Response:
    """A sampler of saved weights, or of a base model."""
    asked = await http_bodies.json_of(
        request, types.CreateSamplingSessionRequest, desk.settings.max_body
    )
    desk.sessions.get(asked.session_id)
    sampler_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
    if sampler_id not in desk.samplers:
        sampler = await desk.apart(_sampler(desk, asked, sampler_id))
        if sampler_id not in desk.samplers:
            desk.samplers.add(sampler)
    return http_bodies.reply(types.CreateSamplingSessionResponse(sampling_session_id=sampler_id))


async def join_sampling_session(desk: ServerState, request: Request) -> Response:
    """A number for another copy of a sampler's client."""
    asked = await http_bodies.json_of(
        request, types.JoinSamplingSessionRequest, desk.settings.max_body
    )
    sampler = desk.samplers.get(asked.sampling_session_id)
    sampler.copies += 1
    return http_bodies.reply(types.JoinSamplingSessionResponse(client_counter=sampler.copies))


async def get_sampler(desk: ServerState, request: Request) -> Response:
    """What a sampler samples from.

    The SDK loads the tokenizer by this name of the base model, so it is one that leads there.
    """
    sampler = desk.samplers.get(request.path_params["sampler_id"])
    base = desk.models.find(sampler.base_model).tokenizer
    return http_bodies.reply(
        types.GetSamplerResponse(
            sampler_id=sampler.sampler_id, base_model=base, model_path=sampler.model_path
        )
    )


async def asample(desk: ServerState, request: Request) -> Response:
    """Continuations of a prompt."""
    asked = await http_bodies.json_of(request, types.SampleRequest, desk.settings.max_body)
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise InputError("sampling_session_id and seq_id must be given.")
    sampler = desk.samplers.get(asked.sampling_session_id)
    desk.sessions.heard(sampler.session_id)
    _check_size(asked, desk.models.find(sampler.base_model).context, desk.settings.max_tokens)
    news = sampler.news_of(asked.seq_id // BLOCK)
    name = f"{sampler.sampler_id}:{asked.seq_id}"
    ticket = desk.tickets.get(name)
    if ticket is None:
        ticket = desk.tickets.issue(name, "asample", sampler.session_id)
        ticket.when_settled(news.add)
        await desk.apart(_begin(sampler, asked, ticket))
    else:
        ticket.check()
    sequences = [f"{name}:{number}" for number in range(asked.num_samples)]
    return http_bodies.promise(ticket, sequences=sequences)


async def _begin(
    sampler: SamplingSession, asked: types.SampleRequest, ticket: ServerFuture
) -> None:
    try:
        client = await asyncio.shield(asyncio.wrap_future(sampler.client))
        work = await asyncio.to_thread(_sample, client, asked)
    except Exception as error:  # noqa: BLE001 - the client hears of it
        ticket.turn_away(error)
    else:
        ticket.follow(work, codec.sample_answer)


async def _sampler(
    desk: ServerState, asked: types.CreateSamplingSessionRequest, sampler_id: str
) -> SamplingSession:
    path, session_id = asked.model_path, asked.session_id
    if path is None and asked.base_model is None:
        raise InputError("model_path or base_model must be given, got neither.")
    base = None if asked.base_model is None else desk.models.find(asked.base_model).name

    def begin() -> tuple[str, Future[LocalSamplingClient]]:
        if path is None:
            assert base is not None  # noqa: S101 - for the type checker
            return base, desk.service.begin_sampling(base_model=base)
        check_path(path)
        trained = str(desk.service.checkpoints.read(path).info["base_model"])
        return desk.models.find(trained).name, desk.service.begin_sampling(path, base)

    name, client = await asyncio.to_thread(begin)
    return SamplingSession(sampler_id, session_id, name, path, client)


def _sample(
    client: LocalSamplingClient, asked: types.SampleRequest
) -> Future[types.SampleResponse]:
    targets = asked.target_prompt_logprobs
    return client.sample(
        asked.prompt,
        asked.num_samples,
        asked.sampling_params,
        bool(asked.prompt_logprobs),
        asked.topk_prompt_logprobs,
        asked.topk_sample_logprobs,
        None if targets is None else _targets(targets),
        asked.prompt_alt_tokens_k,
        asked.prompt_logprobs_last_n,
    )


def _targets(given: pydantic.BaseModel) -> types.TensorData:
    try:
        tensor = types.TensorData(**given.model_dump())
        tensor.to_torch(pad_value=-1)  # sparse ones are put together here
    except (AssertionError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"target_prompt_logprobs must be a whole tensor: {error}") from error
    return tensor


def _check_size(asked: types.SampleRequest, context: int, most: int) -> None:
    wanted = asked.sampling_params.max_tokens
    each = context if wanted is None else min(max(wanted, 1), context)
    tokens = asked.prompt.length + max(asked.num_samples, 1) * each
    if tokens > most:
        raise HTTPException(
            TOO_LARGE,
            f"a request must ask for at most {most} tokens, the prompt's among them, got {tokens}.",
        )
    targets = asked.target_prompt_logprobs
    if targets is not None and math.prod(targets.shape or ()) > most:
        raise HTTPException(TOO_LARGE, f"target_prompt_logprobs must hold at most {most} cells.")
