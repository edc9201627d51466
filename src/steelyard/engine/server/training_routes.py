"""Requests of models in training."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from tinker import types

from steelyard.engine.adapter import check_adam
from steelyard.engine.checkpoints import check_name
from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.server import codec, http_bodies
from steelyard.engine.server.futures import Answer, ServerFuture
from steelyard.engine.server.http_errors import Oversized
from steelyard.engine.server.model_routes import check_source, resume
from steelyard.engine.server.sampling_sessions import SamplingSession
from steelyard.engine.server.state import ServerState, TrainingRun
from steelyard.engine.server.uploaded_loss.interpreter import TracedLoss
from steelyard.engine.training_client import LocalTrainingClient
from steelyard.errors import InputError

M = TypeVar("M", bound=pydantic.BaseModel)
Output = types.ForwardBackwardOutput

_FOR_SAMPLER = "save_weights_for_sampler"


class Numbered(pydantic.BaseModel):
    """Whose request it is, and which, whatever else is wrong with it."""

    model_id: str
    seq_id: int


async def load_weights(desk: ServerState, request: Request) -> Response:
    """Saved weights, into a model or into a new one."""
    asked = await _numbered(desk, request, types.LoadWeightsRequest, "load_weights")
    if asked.session_id is not None and asked.model_seq_id is not None:
        return await resume(desk, asked, asked.session_id, asked.model_seq_id)
    if asked.model_id is None:
        raise InputError("model_id, or session_id and model_seq_id, must be given.")
    run = desk.run(asked.model_id)

    def check() -> Callable[[], Future[types.LoadWeightsResponse]]:
        check_source(asked)
        load = run.client.begin_loading
        return lambda: _future(load(asked.path, optimizer=asked.optimizer))

    ticket = await desk.submit(run, asked.seq_id, "load_weights", check, codec.json_answer)
    return http_bodies.promise(ticket, run.model_id)


async def forward_backward(desk: ServerState, request: Request) -> Response:
    """Losses, log-probs and gradients."""
    limits = desk.settings
    try:
        body = await http_bodies.body_of(request, limits.max_body)
    except Oversized as error:
        found = codec.start_of_batch(error.start)
        if found is not None:
            await _refuse(desk, *found, "forward_backward", error)
        raise
    message = await asyncio.to_thread(codec.parse_batch, body)
    run = desk.run(message.model_id)
    losses = desk.sessions.get(run.session_id).losses

    def check() -> Callable[[], Future[Output]]:
        batch = codec.read_batch(message, limits.max_tokens, limits.max_body)
        return _batch_call(run.client, batch, losses)

    verb = "forward" if message.forward_only else "forward_backward"
    ticket = await desk.submit(run, message.seq_id, verb, check, codec.output_answer)
    return http_bodies.promise(ticket, run.model_id)


async def optim_step(desk: ServerState, request: Request) -> Response:
    """A step with the gathered gradients."""
    asked = await _numbered(desk, request, types.OptimStepRequest, "optim_step")
    run = desk.run(asked.model_id)

    def check() -> Callable[[], Future[types.OptimStepResponse]]:
        params = check_adam(asked.optim_params)
        return lambda: _future(run.client.optim_step(params))

    ticket = await desk.submit(run, asked.seq_id, "optim_step", check, codec.json_answer)
    return http_bodies.promise(ticket, run.model_id)


async def save_weights(desk: ServerState, request: Request) -> Response:
    """A checkpoint to go on from."""
    asked = await _numbered(desk, request, types.SaveWeightsRequest, "save_weights")
    run = desk.run(asked.model_id)
    name = asked.path

    def check() -> Callable[[], Future[types.SaveWeightsResponse]]:
        given = check_name("name", name)
        save = run.client.save_state
        return lambda: _future(save(given, asked.ttl_seconds, asked.overwrite, asked.user_metadata))

    ticket = await desk.submit(run, asked.seq_id, "save_weights", check, codec.json_answer)
    return http_bodies.promise(ticket, run.model_id)


async def save_weights_for_sampler(desk: ServerState, request: Request) -> Response:
    """Weights to sample from: a checkpoint, or a sampler with a copy of the weights."""
    asked = await _numbered(desk, request, types.SaveWeightsForSamplerRequest, _FOR_SAMPLER)
    run = desk.run(asked.model_id)
    if asked.path is None:
        ticket = await _copied(desk, run, asked)
    else:

        def check() -> Callable[[], Future[types.SaveWeightsForSamplerResponse]]:
            name = check_name("name", asked.path)
            save = run.client.save_weights_for_sampler
            return lambda: _future(save(name, asked.ttl_seconds, asked.user_metadata))

        ticket = await desk.submit(run, asked.seq_id, _FOR_SAMPLER, check, codec.json_answer)
    return http_bodies.promise(ticket, run.model_id)


async def _numbered(desk: ServerState, request: Request, model: type[M], verb: str) -> M:
    """A request in JSON that has a number; if it is wrong, what stands behind goes on.

    Raises:
        HTTPException: it is none of this kind.
    """
    body = await http_bodies.body_of(request, desk.settings.max_body)
    try:
        return await asyncio.to_thread(codec.read_json, model, body)
    except HTTPException as error:
        refused = error
    with contextlib.suppress(pydantic.ValidationError):
        numbered = Numbered.model_validate_json(body)
        await _refuse(desk, numbered.model_id, numbered.seq_id, verb, refused)
    raise refused


async def _refuse(
    desk: ServerState, model_id: str, number: int, verb: str, error: HTTPException
) -> None:
    """Turn a request away in its place, so that what stands behind goes on."""

    def refuse() -> Any:
        raise error

    with contextlib.suppress(HTTPException):
        await desk.submit(desk.run(model_id), number, verb, refuse, codec.json_answer)


async def _copied(
    desk: ServerState, run: TrainingRun, asked: types.SaveWeightsForSamplerRequest
) -> ServerFuture:
    """A sampler with a copy of the weights as they are at this request's turn."""
    if asked.sampling_session_seq_id is None:
        raise InputError("path or sampling_session_seq_id must be given, got neither.")
    sampler_id = f"{run.session_id}:sample:{asked.sampling_session_seq_id}"
    base = run.client.get_info().model_name or ""

    def copy() -> Future[LocalSamplingClient]:
        client = run.client.snapshot().future()
        desk.samplers.add(SamplingSession(sampler_id, run.session_id, base, None, client))
        return client

    def named(_: LocalSamplingClient) -> Answer:
        return codec.json_answer(
            types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id)
        )

    return await desk.submit(run, asked.seq_id, _FOR_SAMPLER, lambda: copy, named)


def _batch_call(
    client: LocalTrainingClient, batch: codec.RequestBatch, losses: dict[str, TracedLoss]
) -> Callable[[], Future[Output]]:
    if batch.loss_fn != "custom":
        call = client.prepare(batch.data, batch.loss_fn, batch.config, backward=batch.backward)
    elif not batch.backward:
        raise InputError("a custom loss is for forward_backward, got forward.")
    else:
        loss = losses.get(str(batch.config.get("loss_id")))
        if loss is None:
            raise InputError(
                f"loss_fn_config['loss_id'] must be that of a loss this client has uploaded, "
                f"got {batch.config.get('loss_id')!r}."
            )
        call = client.prepare_custom(batch.data, loss.of(batch.data))
    return lambda: call().future()


def _future(given: Any) -> Future[Any]:
    future: Future[Any] = given.future()
    return future
