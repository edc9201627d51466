"""Endpoints of models: create, describe and unload them, train them, save and load weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from tinker import types

from steelyard.composition.named_losses import TEMPERATURE, split_temperature
from steelyard.engine.adapter import LoraSettings, check_adam
from steelyard.engine.checkpoints import SCHEME, check_name
from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.server import codec, http_messages
from steelyard.engine.server.futures import Sequencer, ServerFuture
from steelyard.engine.server.http_messages import BodyTooLarge, EncodedResult, conflict
from steelyard.engine.server.sessions import SamplingSession
from steelyard.engine.server.state import ServerState, TrainingRun
from steelyard.engine.server.uploaded_loss.budget import LossBudget
from steelyard.engine.server.uploaded_loss.interpreter import TracedLoss
from steelyard.engine.service_client import check_optimizer
from steelyard.engine.training_client import LocalTrainingClient
from steelyard.errors import InputError

M = TypeVar("M", bound=pydantic.BaseModel)
Output = types.ForwardBackwardOutput

_SAVE_FOR_SAMPLER = "save_weights_for_sampler"
_CUSTOM, _LOSS_ID = "custom", "loss_id"


async def create_model(state: ServerState, request: Request) -> types.UntypedAPIFuture:
    """Create a model: a fresh adapter over a base model."""
    body = await state.read(request, types.CreateModelRequest)
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
    return future.reference(model_id)


async def get_info(state: ServerState, request: Request) -> types.GetInfoResponse:
    """Describe a model, with the path of its tokenizer."""
    body = await state.read(request, types.GetInfoRequest)
    info = state.get_run(body.model_id).client.get_info()
    base = state.models.find(info.model_name or "")
    data = info.model_data.model_copy(update={"tokenizer_id": base.tokenizer})
    return info.model_copy(update={"model_data": data})


async def unload_model(state: ServerState, request: Request) -> types.UntypedAPIFuture:
    """Unload a model."""
    body = await state.read(request, types.UnloadModelRequest)
    run = state.get_run(body.model_id)
    state.unload(run.model_id, "the model was unloaded.")
    future = state.futures.create(f"{run.model_id}:unload", "unload_model", run.session_id)
    future.settle(codec.encode_json(types.UnloadModelResponse(model_id=run.model_id)))
    return future.reference(run.model_id)


async def resume(
    state: ServerState, body: types.LoadWeightsRequest, session_id: str, model_seq_id: int
) -> types.UntypedAPIFuture:
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
    return future.reference(model_id)


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


async def load_weights(state: ServerState, request: Request) -> types.UntypedAPIFuture:
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
        return lambda: load(body.path, optimizer=body.optimizer).future()

    return await _submit_json(state, run, body, "load_weights", validate)


async def forward_backward(state: ServerState, request: Request) -> types.UntypedAPIFuture:
    """Compute losses and log-probs, and accumulate gradients unless it is a forward request."""
    limits = state.settings
    try:
        body = await http_messages.read_body(request, limits.max_body)
    except BodyTooLarge as error:
        await _reject_in_sequence(
            state, codec.peek_batch_ids(error.prefix), "forward_backward", error
        )
        raise
    try:
        message = await asyncio.to_thread(codec.parse_batch, body)
    except HTTPException as error:
        await _reject_in_sequence(state, codec.peek_batch_ids(body), "forward_backward", error)
        raise
    run = state.get_run(message.model_id)
    losses = state.sessions.get(run.session_id).losses

    def validate() -> Callable[[], Future[Output]]:
        batch = codec.decode_batch(message, limits.max_tokens, limits.max_body)
        return _engine_call(state, run, batch, losses)

    future = await state.submit(
        run,
        message.seq_id,
        "forward" if message.forward_only else "forward_backward",
        validate,
        codec.encode_output,
        payload=await asyncio.to_thread(codec.hash_batch, message),
        exclusive=message.loss_fn == _CUSTOM,
    )
    return future.reference(run.model_id)


async def optim_step(state: ServerState, request: Request) -> types.UntypedAPIFuture:
    """Update the weights with the accumulated gradients."""
    body = await _read_sequenced(state, request, types.OptimStepRequest, "optim_step")
    run = state.get_run(body.model_id)

    def validate() -> Callable[[], Future[types.OptimStepResponse]]:
        params = check_adam(body.optim_params)
        return lambda: run.client.optim_step(params).future()

    return await _submit_json(state, run, body, "optim_step", validate)


async def save_weights(state: ServerState, request: Request) -> types.UntypedAPIFuture:
    """Save a checkpoint of the weights and the optimizer state."""
    body = await _read_sequenced(state, request, types.SaveWeightsRequest, "save_weights")
    run = state.get_run(body.model_id)

    def validate() -> Callable[[], Future[types.SaveWeightsResponse]]:
        name = check_name("name", body.path)
        save = run.client.save_state
        return lambda: save(name, body.ttl_seconds, body.overwrite, body.user_metadata).future()

    return await _submit_json(state, run, body, "save_weights", validate)


async def save_weights_for_sampler(state: ServerState, request: Request) -> types.UntypedAPIFuture:
    """Save weights for sampling: as a checkpoint, or as a sampler with a copy of them."""
    body = await _read_sequenced(
        state, request, types.SaveWeightsForSamplerRequest, _SAVE_FOR_SAMPLER
    )
    run = state.get_run(body.model_id)
    if body.path is None:
        return await _snapshot(state, run, body)

    def validate() -> Callable[[], Future[types.SaveWeightsForSamplerResponse]]:
        name = check_name("name", body.path)
        save = run.client.save_weights_for_sampler
        return lambda: save(name, body.ttl_seconds, body.user_metadata).future()

    return await _submit_json(state, run, body, _SAVE_FOR_SAMPLER, validate)


async def _read_sequenced(
    state: ServerState, request: Request, model: type[M], request_type: str
) -> M:
    """Read a request in JSON; if it is invalid, later requests do not wait for it.

    Raises:
        HTTPException: the body is not a valid `model`, or too large.
    """
    try:
        body = await http_messages.read_body(request, state.settings.max_body)
    except BodyTooLarge as error:
        await _reject_in_sequence(state, codec.peek_json_ids(error), request_type, error)
        raise
    try:
        return await asyncio.to_thread(http_messages.parse_json, model, body)
    except HTTPException as error:
        await _reject_in_sequence(state, codec.json_ids(body), request_type, error)
        raise


async def _submit_json(
    state: ServerState,
    run: TrainingRun,
    body: Any,  # one of the SDK's requests with a `seq_id`
    request_type: str,
    validate: Callable[[], Callable[[], Future[Any]]],
    encode: Callable[[Any], EncodedResult] = codec.encode_json,
) -> types.UntypedAPIFuture:
    payload = await asyncio.to_thread(codec.hash_json, body)
    future = await state.submit(run, body.seq_id, request_type, validate, encode, payload=payload)
    return future.reference(run.model_id)


async def _reject_in_sequence(
    state: ServerState, ids: tuple[str, int] | None, request_type: str, error: HTTPException
) -> None:
    """Reject a request through its sequencer, so that later requests do not wait for it.

    Args:
        state: of the server.
        ids: the model id and the sequence id; None if the request does not show them.
        request_type: the type of the request.
        error: says why.
    """
    if ids is None:
        return
    model_id, seq_id = ids

    def fail() -> Any:
        raise error

    with contextlib.suppress(HTTPException):
        await state.submit(state.get_run(model_id), seq_id, request_type, fail, codec.encode_json)


async def _snapshot(
    state: ServerState, run: TrainingRun, body: types.SaveWeightsForSamplerRequest
) -> types.UntypedAPIFuture:
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
    run: TrainingRun,
    batch: codec.RequestBatch,
    losses: dict[str, TracedLoss],
) -> Callable[[], Future[Output]]:
    if batch.loss_fn != _CUSTOM:
        call = run.client.prepare(batch.data, batch.loss_fn, batch.config, backward=batch.backward)
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
    bound = state.loss_processes.bind(loss, batch.data, budget)
    run_pass = run.client.prepare_custom(batch.data, bound, temperature, meanwhile=bound.check)

    def run_in_turn(end_turn: Callable[[], object]) -> Output:
        bound.on_slow = end_turn
        return run_pass()

    return lambda: state.loss_queue.submit(run.session_id, run_in_turn)
