"""The requests of the SDK's `RestClient`."""

from __future__ import annotations

import asyncio
import re
import time

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types

from steelyard.engine.checkpoints import SCHEME, CheckpointEntry
from steelyard.engine.server import http_bodies, listing
from steelyard.engine.server.http_errors import not_found
from steelyard.engine.server.model_routes import check_path
from steelyard.engine.server.state import ServerState
from steelyard.errors import CheckpointError, InputError

_LONGEST_PAGE = 1000
_WHOLE = re.compile(r"[0-9]{1,9}")


class Path(pydantic.BaseModel):
    """Which checkpoint."""

    tinker_path: str


class Ttl(pydantic.BaseModel):
    """How long a checkpoint is to be kept."""

    ttl_seconds: int | None = None


async def list_training_runs(desk: ServerState, request: Request) -> Response:
    """The training runs there are."""
    offset, limit = _page(request)
    live = list(desk.runs.values())
    runs = await asyncio.to_thread(listing.training_runs, desk.service.checkpoints, live)
    part, cursor = listing.page(runs, offset, limit)
    return http_bodies.reply(types.TrainingRunsResponse(training_runs=part, cursor=cursor))


async def get_training_run(desk: ServerState, request: Request) -> Response:
    """One of them."""
    name = request.path_params["run"]
    saved = await _saved(desk, name)
    return http_bodies.reply(listing.training_run(name, saved, desk.runs.get(name)))


async def list_checkpoints(desk: ServerState, request: Request) -> Response:
    """The checkpoints of a training run."""
    saved = await _saved(desk, request.path_params["run"])
    return http_bodies.reply(
        types.CheckpointsListResponse(checkpoints=[listing.checkpoint(each) for each in saved])
    )


async def list_user_checkpoints(desk: ServerState, request: Request) -> Response:
    """All checkpoints."""
    offset, limit = _page(request)
    saved = await asyncio.to_thread(desk.service.checkpoints.entries)
    part, cursor = listing.page(saved, offset, limit)
    return http_bodies.reply(
        types.CheckpointsListResponse(
            checkpoints=[listing.checkpoint(each) for each in part], cursor=cursor
        )
    )


async def delete_checkpoint(desk: ServerState, request: Request) -> Response:
    """Remove a checkpoint."""
    path = (await _listed(desk, _path(request))).path
    await asyncio.to_thread(desk.service.checkpoints.delete, path)
    return JSONResponse(None)


async def set_checkpoint_ttl(desk: ServerState, request: Request) -> Response:
    """Let a checkpoint expire."""
    asked = await http_bodies.json_of(request, Ttl, desk.settings.max_body)
    seconds = asked.ttl_seconds
    if seconds is not None and not 1 <= seconds <= 2**32:
        raise InputError(f"ttl_seconds must be from 1 to 2**32 or None, got {seconds}.")
    path = (await _listed(desk, _path(request))).path
    expires = None if seconds is None else time.time() + seconds
    await asyncio.to_thread(desk.service.checkpoints.set_expiry, path, expires)
    return JSONResponse(None)


async def publish_checkpoint(_: ServerState, __: Request) -> Response:
    """There is nobody to publish for."""
    raise InputError("a checkpoint cannot be published: this server has one user.")


async def weights_info(desk: ServerState, request: Request) -> Response:
    """What is needed to go on from a checkpoint."""
    asked = await http_bodies.json_of(request, Path, desk.settings.max_body)
    return http_bodies.reply(listing.weights_info(await _listed(desk, asked.tinker_path)))


async def list_sessions(desk: ServerState, request: Request) -> Response:
    """The clients that are here; the newest first."""
    offset, limit = _page(request)
    newest = sorted(desk.sessions, key=lambda session: session.created, reverse=True)
    part, _ = listing.page([session.session_id for session in newest], offset, limit)
    return http_bodies.reply(types.ListSessionsResponse(sessions=part))


async def get_session(desk: ServerState, request: Request) -> Response:
    """One of them, with its models and samplers."""
    session = desk.sessions.get(request.path_params["session_id"])
    return http_bodies.reply(
        types.GetSessionResponse(
            training_run_ids=[
                types.ModelID(run.model_id)
                for run in desk.runs.values()
                if run.session_id == session.session_id
            ],
            sampler_ids=desk.samplers.of_session(session.session_id),
            user_metadata={str(k): str(v) for k, v in session.user_metadata.items()},
            display_name=session.display_name,
        )
    )


async def _saved(desk: ServerState, run: str) -> list[CheckpointEntry]:
    try:
        return await asyncio.to_thread(desk.service.checkpoints.entries, run)
    except CheckpointError as error:  # nothing can have such a name
        raise not_found(
            "training_run_id", run, "list_training_runs lists those there are"
        ) from error


async def _listed(desk: ServerState, path: str) -> CheckpointEntry:
    check_path(path)
    run = path.removeprefix(SCHEME).partition("/")[0]
    for listed in await _saved(desk, run):
        if listed.path == path:
            return listed
    raise not_found("path", path, "list_checkpoints lists those there are")


def _path(request: Request) -> str:
    return f"{SCHEME}{request.path_params['run']}/{request.path_params['checkpoint']}"


def _page(request: Request) -> tuple[int, int]:
    found = []
    for name, default, least in (("offset", "0", 0), ("limit", "20", 1)):
        text = request.query_params.get(name, default)
        if not _WHOLE.fullmatch(text) or int(text) < least:
            raise InputError(f"{name} must be a whole number >= {least}, got {text!r}.")
        found.append(int(text))
    return found[0], min(found[1], _LONGEST_PAGE)
