"""Endpoints of a model in training: batches, optimizer steps and checkpoints."""

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

from steelyard.composition import TEMPERATURE, split_temperature
from steelyard.engine.adapter import check_adam
from steelyard.engine.checkpoints import check_name
from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.server import codec, http_bodies
from steelyard.engine.server.futures import EncodedResult, ServerFuture
from steelyard.engine.server.http_errors import BodyTooLarge, conflict
from steelyard.engine.server.model_routes import check_source, resume
from steelyard.engine.server.sampling_sessions import SamplingSession
from steelyard.engine.server.state import ServerState, TrainingRun
from steelyard.engine.server.uploaded_loss import LossBudget, TracedLoss
from steelyard.engine.training_client import LocalTrainingClient
from steelyard.errors import InputError

M = TypeVar("M", bound=pydantic.BaseModel)
Output = types.ForwardBackwardOutput

_SAVE_FOR_SAMPLER = "save_weights_for_sampler"
_CUSTOM, _LOSS_ID = "custom", "loss_id"


class RequestIds(pydantic.BaseModel):
    """Model and sequence id of a request that is invalid otherwise."""

    model_id: str
    seq_id: int


async def load_weights(state: ServerState, request: Request) -> Response:
    """Load saved weights into a model, or create a model from them."""
    body = await _read_sequenced(state, request, types.LoadWeightsRequest, "load_weights")
    if body.session_id is not None and body.model_seq_id is not None:
        return await resume(state, body, body.session_id, body.model_seq_id)
    if body.model_id is None:
        raise InputError("model_id, or session_id and model_seq_id, must be given.")
    run = state.get_run(body.model_id)

    def validate() -> Callable[[], Future[types.LoadWeightsResponse]]:
        check_source(body)
        load = run.client.begin_loading
        return lambda: _engine_future(load(body.path, optimizer=body.optimizer))

    future = await _submit_json(state, run, body, "load_weights", validate)
    return http_bodies.future_response(future, run.model_id)


async def forward_backward(state: ServerState, request: Request) -> Response:
    """Compute losses and log-probs, and accumulate gradients unless it is a forward request."""
    limits = state.settings
    try:
        body = await http_bodies.read_body(request, limits.max_body)
    except BodyTooLarge as error:
        ids = codec.peek_batch_ids(error.prefix)
        if ids is not None:
            await _reject_in_sequence(state, *ids, "forward_backward", error)
        raise
    try:
        message = await asyncio.to_thread(codec.parse_batch, body)
    except HTTPException as error:
        ids = codec.peek_batch_ids(body)
        if ids is not None:
            await _reject_in_sequence(state, *ids, "forward_backward", error)
        raise
    run = state.get_run(message.model_id)
    losses = state.sessions.get(run.session_id).losses

    def validate() -> Callable[[], Future[Output]]:
        batch = codec.decode_batch(message, limits.max_tokens, limits.max_body)
        return _engine_call(state, run.client, batch, losses)

    future = await state.submit(
        run,
        message.seq_id,
        "forward" if message.forward_only else "forward_backward",
        validate,
        codec.encode_output,
        payload=await asyncio.to_thread(codec.hash_batch, message),
        exclusive=message.loss_fn == _CUSTOM,
    )
    return http_bodies.future_response(future, run.model_id)


async def optim_step(state: ServerState, request: Request) -> Response:
    """Update the weights with the accumulated gradients."""
    body = await _read_sequenced(state, request, types.OptimStepRequest, "optim_step")
    run = state.get_run(body.model_id)

    def validate() -> Callable[[], Future[types.OptimStepResponse]]:
        params = check_adam(body.optim_params)
        return lambda: _engine_future(run.client.optim_step(params))

    future = await _submit_json(state, run, body, "optim_step", validate)
    return http_bodies.future_response(future, run.model_id)


async def save_weights(state: ServerState, request: Request) -> Response:
    """Save a checkpoint of the weights and the optimizer state."""
    body = await _read_sequenced(state, request, types.SaveWeightsRequest, "save_weights")
    run = state.get_run(body.model_id)

    def validate() -> Callable[[], Future[types.SaveWeightsResponse]]:
        name = check_name("name", body.path)
        save = run.client.save_state
        return lambda: _engine_future(
            save(name, body.ttl_seconds, body.overwrite, body.user_metadata)
        )

    future = await _submit_json(state, run, body, "save_weights", validate)
    return http_bodies.future_response(future, run.model_id)


async def save_weights_for_sampler(state: ServerState, request: Request) -> Response:
    """Save weights for sampling: as a checkpoint, or as a sampler with a copy of them."""
    body = await _read_sequenced(
        state, request, types.SaveWeightsForSamplerRequest, _SAVE_FOR_SAMPLER
    )
    run = state.get_run(body.model_id)
    if body.path is None:
        future = await _snapshot(state, run, body)
    else:

        def validate() -> Callable[[], Future[types.SaveWeightsForSamplerResponse]]:
            name = check_name("name", body.path)
            save = run.client.save_weights_for_sampler
            return lambda: _engine_future(save(name, body.ttl_seconds, body.user_metadata))

        future = await _submit_json(state, run, body, _SAVE_FOR_SAMPLER, validate)
    return http_bodies.future_response(future, run.model_id)


async def _read_sequenced(
    state: ServerState, request: Request, model: type[M], request_type: str
) -> M:
    """Read a request in JSON; if it is invalid, later requests do not wait for it.

    Raises:
        HTTPException: the body is not a valid `model`, or too large.
    """
    try:
        body = await http_bodies.read_body(request, state.settings.max_body)
    except BodyTooLarge as error:
        known = codec.peek_json_ids(error)
        if known is not None:
            await _reject_in_sequence(state, *known, request_type, error)
        raise
    try:
        return await asyncio.to_thread(codec.parse_json, model, body)
    except HTTPException as error:
        rejection = error
    with contextlib.suppress(pydantic.ValidationError):
        ids = RequestIds.model_validate_json(body)
        await _reject_in_sequence(state, ids.model_id, ids.seq_id, request_type, rejection)
    raise rejection


async def _submit_json(
    state: ServerState,
    run: TrainingRun,
    body: Any,  # one of the SDK's requests with a `seq_id`
    request_type: str,
    validate: Callable[[], Callable[[], Future[Any]]],
    encode: Callable[[Any], EncodedResult] = codec.encode_json,
) -> ServerFuture:
    payload = await asyncio.to_thread(codec.hash_json, body)
    return await state.submit(run, body.seq_id, request_type, validate, encode, payload=payload)


async def _reject_in_sequence(
    state: ServerState, model_id: str, seq_id: int, request_type: str, error: HTTPException
) -> None:
    """Reject a request through its sequencer, so that later requests do not wait for it."""

    def fail() -> Any:
        raise error

    with contextlib.suppress(HTTPException):
        await state.submit(state.get_run(model_id), seq_id, request_type, fail, codec.encode_json)


async def _snapshot(
    state: ServerState, run: TrainingRun, body: types.SaveWeightsForSamplerRequest
) -> ServerFuture:
    """Create a sampler with a copy of the weights as they are when this request runs."""
    sampler_id = f"{run.session_id}:sample:{body.sampling_session_seq_id}"
    base = run.client.get_info().model_name or ""

    def copy() -> Future[LocalSamplingClient]:
        client = run.client.snapshot().future()
        state.samplers.add(SamplingSession(sampler_id, run.session_id, base, None, client))
        return client

    def validate() -> Callable[[], Future[LocalSamplingClient]]:
        # Here and not before `submit`, which lets later requests run if this one is rejected.
        number = body.sampling_session_seq_id
        if number is None:
            raise InputError("path or sampling_session_seq_id must be given, got neither.")
        if sampler_id in state.samplers:
            raise conflict(
                "sampling_session_seq_id", str(number), "a sampler", "one of other weights"
            )
        return copy

    def encode(_: LocalSamplingClient) -> EncodedResult:
        return codec.encode_json(
            types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id)
        )

    return await _submit_json(state, run, body, _SAVE_FOR_SAMPLER, validate, encode)


def _engine_call(
    state: ServerState,
    client: LocalTrainingClient,
    batch: codec.RequestBatch,
    losses: dict[str, TracedLoss],
) -> Callable[[], Future[Output]]:
    if batch.loss_fn != _CUSTOM:
        call = client.prepare(batch.data, batch.loss_fn, batch.config, backward=batch.backward)
        return lambda: call().future()
    if not batch.backward:
        raise InputError("a custom loss is for forward_backward, got forward.")
    temperature, settings = split_temperature(batch.config)
    for key in settings:
        if key != _LOSS_ID:
            raise InputError(
                f"loss_fn_config of a custom loss may hold {[_LOSS_ID, TEMPERATURE]}, "
                f"got the key {key!r}."
            )
    loss = losses.get(str(settings.get(_LOSS_ID)))
    if loss is None:
        raise InputError(
            f"loss_fn_config[{_LOSS_ID!r}] must be that of a loss this client has uploaded, "
            f"got {settings.get(_LOSS_ID)!r}."
        )
    limits = state.settings
    budget = LossBudget(limits.max_loss_bytes, limits.loss_seconds)
    bound = state.loss_process.bind(loss, batch.data, budget)
    run = client.prepare_custom(batch.data, bound, temperature)

    def check_and_run() -> Output:
        bound.check()
        return run()

    return lambda: state.loss_thread.submit(check_and_run)


def _engine_future(api_future: Any) -> Future[Any]:
    future: Future[Any] = api_future.future()
    return future
