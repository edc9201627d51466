"""Endpoints that create, describe and unload models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pydantic
from starlette.requests import Request
from starlette.responses import Response
from tinker import types

from steelyard.engine.adapter import LoraSettings
from steelyard.engine.checkpoints import SCHEME
from steelyard.engine.server import codec, http_bodies
from steelyard.engine.server.futures import EncodedResult, ServerFuture
from steelyard.engine.server.sequencer import Sequencer
from steelyard.engine.server.state import ServerState, TrainingRun
from steelyard.engine.service_client import check_optimizer
from steelyard.engine.training_client import LocalTrainingClient
from steelyard.errors import InputError


async def create_model(state: ServerState, request: Request) -> Response:
    """Create a model: a fresh adapter over a base model."""
    body = await http_bodies.read_json(request, types.CreateModelRequest, state.settings.max_body)
    session = state.sessions.get(body.session_id)
    base = state.models.find(body.base_model)
    check_optimizer(body.optimizer_config)
    if body.lora_config is None:
        raise InputError("lora_config must be given: the engine trains adapters alone.")
    settings = LoraSettings(**body.lora_config.model_dump())
    if settings.rank > state.settings.max_rank:
        raise InputError(f"rank must be at most {state.settings.max_rank}, got {settings.rank}.")
    model_id = _model_id(body.session_id, body.model_seq_id)
    metadata = _as_strings(session.user_metadata) | _as_strings(body.user_metadata)
    create = partial(state.service.begin_training, base.name, settings, metadata, model_id)
    future = await _create_once(
        state, body.session_id, model_id, body, "create_model", create, _encode_created
    )
    return http_bodies.future_response(future, model_id)


async def get_info(state: ServerState, request: Request) -> Response:
    """Describe a model, with the path of its tokenizer."""
    body = await http_bodies.read_json(request, types.GetInfoRequest, state.settings.max_body)
    info = state.get_run(body.model_id).client.get_info()
    base = state.models.find(info.model_name or "")
    data = info.model_data.model_copy(update={"tokenizer_id": base.tokenizer})
    return http_bodies.json_response(info.model_copy(update={"model_data": data}))


async def unload_model(state: ServerState, request: Request) -> Response:
    """Unload a model."""
    body = await http_bodies.read_json(request, types.UnloadModelRequest, state.settings.max_body)
    run = state.get_run(body.model_id)
    state.unload(run.model_id, "the model was unloaded.")
    future = state.futures.create(f"{run.model_id}:unload", "unload_model", run.session_id)
    future.settle(codec.encode_json(types.UnloadModelResponse(model_id=run.model_id)))
    return http_bodies.future_response(future, run.model_id)


async def resume(
    state: ServerState, body: types.LoadWeightsRequest, session_id: str, model_seq_id: int
) -> Response:
    """Create a model from saved weights."""
    session = state.sessions.get(session_id)
    check_source(body)
    if body.optimizer_config is not None:
        check_optimizer(body.optimizer_config)
    base = None if body.base_model is None else state.models.find(body.base_model).name
    model_id = _model_id(session_id, model_seq_id)

    def create() -> Future[LocalTrainingClient]:
        checkpoint = state.service.checkpoints.read(body.path)
        state.models.find(str(checkpoint.info["base_model"]))
        return state.service.begin_resuming(
            body.path,
            base,
            _as_strings(session.user_metadata) | _as_strings(body.user_metadata),
            model_id,
            with_optimizer=body.optimizer,
        )

    def encode_loaded(client: LocalTrainingClient) -> EncodedResult:
        return codec.encode_json(
            types.LoadWeightsResponse(path=body.path, model_id=client.model_id)
        )

    future = await _create_once(
        state, session_id, model_id, body, "load_weights", create, encode_loaded
    )
    return http_bodies.future_response(future, model_id)


def check_source(body: types.LoadWeightsRequest) -> None:
    """Check that this server can load the weights that a request names.

    Raises:
        InputError: the path is no checkpoint of this server, or there is an access token.
    """
    if body.weights_access_token is not None:
        raise InputError("weights_access_token is for the Tinker service, and there is none.")
    check_path(body.path)


def check_path(path: str) -> None:
    """Check that `path` is the path of a checkpoint, not of a folder.

    Raises:
        InputError: it does not start with the scheme.
    """
    # The engine also loads folders, but clients must not read the file system of the server.
    if not path.startswith(SCHEME):
        raise InputError(f"path must start with {SCHEME}, got {path!r}.")


async def _create_once(
    state: ServerState,
    session_id: str,
    model_id: str,
    body: pydantic.BaseModel,
    request_type: str,
    create: Callable[[], Future[LocalTrainingClient]],
    encode: Callable[[LocalTrainingClient], EncodedResult],
) -> ServerFuture:
    """Create a model, or return the future of the earlier request to create it.

    The request counts as number 0 of the model, before those in its sequencer.
    """
    request_id, payload = f"{model_id}:0", await asyncio.to_thread(codec.hash_json, body)
    future = state.futures.get(request_id)
    if future is None and model_id in state.runs:  # created before, and the future was dropped
        run = state.runs[model_id]
        future = state.futures.create(request_id, request_type, session_id, run.payload)
        future.settle(encode(run.client))
    if future is not None:
        future.check_repeated(request_type, payload)
        return future
    state.check_model_limit(model_id)
    future = state.futures.create(request_id, request_type, session_id, payload)
    state.creating.add(model_id)

    def register(client: LocalTrainingClient) -> None:
        # The client may have closed its session meanwhile; then the model is dropped.
        if session_id in {session.session_id for session in state.sessions}:
            sequencer = Sequencer(model_id, state.futures, state.settings.max_waiting)
            state.runs[model_id] = TrainingRun(model_id, session_id, client, sequencer, payload)

    future.add_done_callback(lambda _: state.creating.discard(model_id))

    async def start() -> None:
        try:
            engine_future = await asyncio.to_thread(create)
        except Exception as error:  # noqa: BLE001 - reported to the client
            future.reject(error)
        else:
            future.settle_from(engine_future, encode, register)

    await state.run_detached(start())
    return future


def _encode_created(client: LocalTrainingClient) -> EncodedResult:
    return codec.encode_json(types.CreateModelResponse(model_id=client.model_id))


def _model_id(session_id: str, model_seq_id: int) -> str:
    # The SDK builds the same id on its side.
    return f"{session_id}:train:{model_seq_id}"


def _as_strings(metadata: dict[str, Any] | None) -> dict[str, str]:
    return {str(key): str(value) for key, value in (metadata or {}).items()}
