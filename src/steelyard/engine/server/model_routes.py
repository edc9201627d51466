"""Requests that make models, tell of them, and give them up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from tinker import types

from steelyard.engine.adapter import LoraSettings
from steelyard.engine.checkpoints import SCHEME
from steelyard.engine.server import codec, http_bodies
from steelyard.engine.server.futures import Answer, ServerFuture
from steelyard.engine.server.sequencer import Sequencer
from steelyard.engine.server.state import ServerState, TrainingRun
from steelyard.engine.service_client import check_optimizer
from steelyard.engine.training_client import LocalTrainingClient
from steelyard.errors import InputError


async def create_model(desk: ServerState, request: Request) -> Response:
    """A fresh adapter."""
    asked = await http_bodies.json_of(request, types.CreateModelRequest, desk.settings.max_body)
    session = desk.sessions.get(asked.session_id)
    base = desk.models.find(asked.base_model)
    check_optimizer(asked.optimizer_config)
    if asked.lora_config is None:
        raise InputError("lora_config must be given: the engine trains adapters alone.")
    settings = LoraSettings(**asked.lora_config.model_dump())
    if settings.rank > desk.settings.max_rank:
        raise InputError(f"rank must be at most {desk.settings.max_rank}, got {settings.rank}.")
    model_id = _model_id(asked.session_id, asked.model_seq_id)
    metadata = _texts(session.user_metadata) | _texts(asked.user_metadata)
    make = partial(desk.service.begin_training, base.name, settings, metadata, model_id)
    ticket = await _make(desk, asked.session_id, model_id, "create_model", make, _created)
    return http_bodies.promise(ticket, model_id)


async def get_info(desk: ServerState, request: Request) -> Response:
    """What is trained, and where its tokenizer is."""
    asked = await http_bodies.json_of(request, types.GetInfoRequest, desk.settings.max_body)
    info = desk.run(asked.model_id).client.get_info()
    base = desk.models.find(info.model_name or "")
    data = info.model_data.model_copy(update={"tokenizer_id": base.tokenizer})
    return http_bodies.reply(info.model_copy(update={"model_data": data}))


async def unload_model(desk: ServerState, request: Request) -> Response:
    """Give a model up."""
    asked = await http_bodies.json_of(request, types.UnloadModelRequest, desk.settings.max_body)
    run = desk.run(asked.model_id)
    desk.unload(run.model_id, "the model was unloaded.")
    ticket = desk.tickets.issue(f"{run.model_id}:unload", "unload_model", run.session_id)
    ticket.settle(codec.json_answer(types.UnloadModelResponse(model_id=run.model_id)))
    return http_bodies.promise(ticket, run.model_id)


async def resume(
    desk: ServerState, asked: types.LoadWeightsRequest, session_id: str, number: int
) -> Response:
    """A model that goes on from saved weights."""
    session = desk.sessions.get(session_id)
    check_source(asked)
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
            _texts(session.user_metadata) | _texts(asked.user_metadata),
            model_id,
            with_optimizer=asked.optimizer,
        )

    def loaded(client: LocalTrainingClient) -> Answer:
        return codec.json_answer(
            types.LoadWeightsResponse(path=asked.path, model_id=client.model_id)
        )

    ticket = await _make(desk, session_id, model_id, "load_weights", make, loaded)
    return http_bodies.promise(ticket, model_id)


def check_source(asked: types.LoadWeightsRequest) -> None:
    """Nothing, if weights may be loaded from where a request says.

    Raises:
        InputError: they may not.
    """
    if asked.weights_access_token is not None:
        raise InputError("weights_access_token is for the Tinker service, and there is none.")
    check_path(asked.path)


def check_path(path: str) -> None:
    """Nothing, if `path` is that of a checkpoint of this server.

    Raises:
        InputError: it is a folder's.
    """
    # The engine also takes folders; those of the server's machine are none of a client's business.
    if not path.startswith(SCHEME):
        raise InputError(f"path must start with {SCHEME}, got {path!r}.")


async def _make(
    desk: ServerState,
    session_id: str,
    model_id: str,
    verb: str,
    make: Callable[[], Future[LocalTrainingClient]],
    encode: Callable[[LocalTrainingClient], Answer],
) -> ServerFuture:
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
            line = Sequencer(model_id, desk.tickets, desk.settings.max_waiting)
            desk.runs[model_id] = TrainingRun(model_id, session_id, client, line)

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


def _created(client: LocalTrainingClient) -> Answer:
    return codec.json_answer(types.CreateModelResponse(model_id=client.model_id))


def _model_id(session_id: str, number: int) -> str:
    """As the SDK names models too."""
    return f"{session_id}:train:{number}"


def _texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    return {str(key): str(value) for key, value in (metadata or {}).items()}
