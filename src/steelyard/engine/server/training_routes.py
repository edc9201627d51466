"""Requests of models in training."""

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
from starlette.responses import Response
from tinker import types

from steelyard.engine.adapter import LoraSettings, check_adam
from steelyard.engine.checkpoints import SCHEME, check_name
from steelyard.engine.sampling import LocalSamplingClient
from steelyard.engine.server import exchange, wire
from steelyard.engine.server.desk import Desk, Run
from steelyard.engine.server.graphs import TracedLoss
from steelyard.engine.server.line import Line
from steelyard.engine.server.samplers import Sampler
from steelyard.engine.server.tickets import Answer, Ticket
from steelyard.engine.service import check_optimizer
from steelyard.engine.training import LocalTrainingClient
from steelyard.errors import InputError

M = TypeVar("M", bound=pydantic.BaseModel)
Output = types.ForwardBackwardOutput

_FOR_SAMPLER = "save_weights_for_sampler"


class Numbered(pydantic.BaseModel):
    """Whose request it is, and which, whatever else is wrong with it."""

    model_id: str
    seq_id: int


async def create_model(desk: Desk, request: Request) -> Response:
    """A fresh adapter."""
    asked = await exchange.json_of(request, types.CreateModelRequest, desk.settings.max_body)
    desk.sessions.get(asked.session_id)
    base = desk.models.find(asked.base_model)
    check_optimizer(asked.optimizer_config)
    if asked.lora_config is None:
        raise InputError("lora_config must be given: the engine trains adapters alone.")
    settings = LoraSettings(**asked.lora_config.model_dump())
    if settings.rank > desk.settings.max_rank:
        raise InputError(f"rank must be at most {desk.settings.max_rank}, got {settings.rank}.")
    model_id = _model_id(asked.session_id, asked.model_seq_id)
    metadata = _texts(asked.user_metadata)
    make = partial(desk.service.begin_training, base.name, settings, metadata, model_id)
    ticket = await _make(desk, asked.session_id, model_id, "create_model", make, _created)
    return exchange.promise(ticket, model_id)


async def load_weights(desk: Desk, request: Request) -> Response:
    """Saved weights, into a model or into a new one."""
    asked = await _numbered(desk, request, types.LoadWeightsRequest, "load_weights")
    if asked.session_id is not None and asked.model_seq_id is not None:
        return await _resume(desk, asked, asked.session_id, asked.model_seq_id)
    if asked.model_id is None:
        raise InputError("model_id, or session_id and model_seq_id, must be given.")
    run = desk.run(asked.model_id)

    def check() -> Callable[[], Future[types.LoadWeightsResponse]]:
        _check_source(asked)
        load = run.client.begin_loading
        return lambda: _future(load(asked.path, optimizer=asked.optimizer))

    ticket = await desk.submit(run, asked.seq_id, "load_weights", check, wire.json_answer)
    return exchange.promise(ticket, run.model_id)


async def forward_backward(desk: Desk, request: Request) -> Response:
    """Losses, log-probs and gradients."""
    limits = desk.settings
    body = await exchange.body_of(request, limits.max_body)
    message = await asyncio.to_thread(wire.parse_batch, body)
    run = desk.run(message.model_id)
    losses = desk.sessions.get(run.session_id).losses

    def check() -> Callable[[], Future[Output]]:
        batch = wire.read_batch(message, limits.max_tokens, limits.max_body)
        return _batch_call(run.client, batch, losses)

    verb = "forward" if message.forward_only else "forward_backward"
    ticket = await desk.submit(run, message.seq_id, verb, check, wire.output_answer)
    return exchange.promise(ticket, run.model_id)


async def optim_step(desk: Desk, request: Request) -> Response:
    """A step with the gathered gradients."""
    asked = await _numbered(desk, request, types.OptimStepRequest, "optim_step")
    run = desk.run(asked.model_id)

    def check() -> Callable[[], Future[types.OptimStepResponse]]:
        params = check_adam(asked.optim_params)
        return lambda: _future(run.client.optim_step(params))

    ticket = await desk.submit(run, asked.seq_id, "optim_step", check, wire.json_answer)
    return exchange.promise(ticket, run.model_id)


async def save_weights(desk: Desk, request: Request) -> Response:
    """A checkpoint to go on from."""
    asked = await _numbered(desk, request, types.SaveWeightsRequest, "save_weights")
    run = desk.run(asked.model_id)
    name = asked.path

    def check() -> Callable[[], Future[types.SaveWeightsResponse]]:
        given = check_name("name", name)
        save = run.client.save_state
        return lambda: _future(save(given, asked.ttl_seconds, asked.overwrite, asked.user_metadata))

    ticket = await desk.submit(run, asked.seq_id, "save_weights", check, wire.json_answer)
    return exchange.promise(ticket, run.model_id)


async def save_weights_for_sampler(desk: Desk, request: Request) -> Response:
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

        ticket = await desk.submit(run, asked.seq_id, _FOR_SAMPLER, check, wire.json_answer)
    return exchange.promise(ticket, run.model_id)


async def get_info(desk: Desk, request: Request) -> Response:
    """What is trained, and where its tokenizer is."""
    asked = await exchange.json_of(request, types.GetInfoRequest, desk.settings.max_body)
    info = desk.run(asked.model_id).client.get_info()
    base = desk.models.find(info.model_name or "")
    data = info.model_data.model_copy(update={"tokenizer_id": base.tokenizer})
    return exchange.reply(info.model_copy(update={"model_data": data}))


async def unload_model(desk: Desk, request: Request) -> Response:
    """Give a model up."""
    asked = await exchange.json_of(request, types.UnloadModelRequest, desk.settings.max_body)
    run = desk.run(asked.model_id)
    desk.unload(run.model_id, "the model was unloaded.")
    ticket = desk.tickets.issue(f"{run.model_id}:unload", "unload_model", run.session_id)
    ticket.settle(wire.json_answer(types.UnloadModelResponse(model_id=run.model_id)))
    return exchange.promise(ticket, run.model_id)


async def _numbered(desk: Desk, request: Request, model: type[M], verb: str) -> M:
    """A request in JSON that has a number; if it is wrong, what stands behind goes on.

    Raises:
        HTTPException: it is none of this kind.
    """
    body = await exchange.body_of(request, desk.settings.max_body)
    try:
        return await asyncio.to_thread(wire.read_json, model, body)
    except HTTPException as error:
        refused = error
    with contextlib.suppress(HTTPException, pydantic.ValidationError):
        numbered = Numbered.model_validate_json(body)

        def refuse() -> Any:
            raise refused

        run = desk.run(numbered.model_id)
        await desk.submit(run, numbered.seq_id, verb, refuse, wire.json_answer)
    raise refused


async def _copied(desk: Desk, run: Run, asked: types.SaveWeightsForSamplerRequest) -> Ticket:
    """A sampler with a copy of the weights as they are at this request's turn."""
    if asked.sampling_session_seq_id is None:
        raise InputError("path or sampling_session_seq_id must be given, got neither.")
    sampler_id = f"{run.session_id}:sample:{asked.sampling_session_seq_id}"
    base = run.client.get_info().model_name or ""

    def copy() -> Future[LocalSamplingClient]:
        client = run.client.snapshot().future()
        desk.samplers.add(Sampler(sampler_id, run.session_id, base, None, client))
        return client

    def named(_: LocalSamplingClient) -> Answer:
        return wire.json_answer(
            types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampler_id)
        )

    return await desk.submit(run, asked.seq_id, _FOR_SAMPLER, lambda: copy, named)


async def _resume(
    desk: Desk, asked: types.LoadWeightsRequest, session_id: str, number: int
) -> Response:
    desk.sessions.get(session_id)
    _check_source(asked)
    if asked.optimizer_config is not None:
        check_optimizer(asked.optimizer_config)
    base = None if asked.base_model is None else desk.models.find(asked.base_model).name
    model_id = _model_id(session_id, number)

    def make() -> Future[LocalTrainingClient]:
        checkpoint = desk.service.checkpoints.read(asked.path)
        desk.models.find(str(checkpoint.info["base_model"]))
        return desk.service.begin_resuming(
            asked.path,
            base,
            _texts(asked.user_metadata),
            model_id,
            with_optimizer=asked.optimizer,
        )

    def loaded(client: LocalTrainingClient) -> Answer:
        return wire.json_answer(
            types.LoadWeightsResponse(path=asked.path, model_id=client.model_id)
        )

    ticket = await _make(desk, session_id, model_id, "load_weights", make, loaded)
    return exchange.promise(ticket, model_id)


async def _make(
    desk: Desk,
    session_id: str,
    model_id: str,
    verb: str,
    make: Callable[[], Future[LocalTrainingClient]],
    encode: Callable[[LocalTrainingClient], Answer],
) -> Ticket:
    """Make a model, once, however often it is asked for."""
    name = f"{model_id}:0"
    ticket = desk.tickets.get(name)
    if ticket is None and model_id in desk.runs:  # made long ago, and the ticket is not kept
        ticket = desk.tickets.issue(name, verb, session_id)
        ticket.settle(encode(desk.runs[model_id].client))
    if ticket is not None:
        ticket.check()
        return ticket
    desk.room_for(model_id)
    ticket = desk.tickets.issue(name, verb, session_id)
    desk.making.add(model_id)

    def enter(client: LocalTrainingClient) -> None:
        if session_id in {session.session_id for session in desk.sessions}:
            line = Line(model_id, desk.tickets, desk.settings.max_waiting)
            desk.runs[model_id] = Run(model_id, session_id, client, line)

    ticket.when_settled(lambda _: desk.making.discard(model_id))

    async def begin() -> None:
        try:
            work = await asyncio.to_thread(make)
        except Exception as error:  # noqa: BLE001 - the client hears of it
            ticket.turn_away(error)
        else:
            ticket.follow(work, encode, enter)

    await desk.apart(begin())
    return ticket


def _batch_call(
    client: LocalTrainingClient, batch: wire.Batch, losses: dict[str, TracedLoss]
) -> Callable[[], Future[Output]]:
    if batch.loss_fn != "custom":
        call = client.checked(batch.data, batch.loss_fn, batch.config, backward=batch.backward)
    elif not batch.backward:
        raise InputError("a custom loss is for forward_backward, got forward.")
    else:
        loss = losses.get(str(batch.config.get("loss_id")))
        if loss is None:
            raise InputError(
                f"loss_fn_config['loss_id'] must be that of a loss this client has uploaded, "
                f"got {batch.config.get('loss_id')!r}."
            )
        call = client.checked_custom(batch.data, loss.of(batch.data))
    return lambda: call().future()


def _check_source(asked: types.LoadWeightsRequest) -> None:
    if asked.weights_access_token is not None:
        raise InputError("weights_access_token is for the Tinker service, and there is none.")
    check_path(asked.path)


def _created(client: LocalTrainingClient) -> Answer:
    return wire.json_answer(types.CreateModelResponse(model_id=client.model_id))


def _model_id(session_id: str, number: int) -> str:
    """As the SDK names models too."""
    return f"{session_id}:train:{number}"


def check_path(path: str) -> None:
    """Nothing, if `path` is that of a checkpoint of this server.

    Raises:
        InputError: it is a folder's.
    """
    # The engine also takes folders; those of the server's machine are none of a client's business.
    if not path.startswith(SCHEME):
        raise InputError(f"path must start with {SCHEME}, got {path!r}.")


def _texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    return {str(key): str(value) for key, value in (metadata or {}).items()}


def _future(given: Any) -> Future[Any]:
    future: Future[Any] = given.future()
    return future
