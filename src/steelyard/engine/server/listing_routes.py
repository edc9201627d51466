"""Endpoints of the SDK's `RestClient`: training runs, checkpoints and sessions."""

from __future__ import annotations

import asyncio
import re
import time

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types

from steelyard.engine.checkpoint_contents import check_ttl
from steelyard.engine.checkpoints import SCHEME, CheckpointEntry
from steelyard.engine.server import http_bodies, listing
from steelyard.engine.server.http_errors import not_found
from steelyard.engine.server.model_routes import check_path
from steelyard.engine.server.state import ServerState
from steelyard.errors import CheckpointError, InputError

_MAX_PAGE_SIZE = 1000
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")


class WeightsInfoRequest(pydantic.BaseModel):
    """Body of a weights_info request."""

    tinker_path: str


class SetTtlRequest(pydantic.BaseModel):
    """Body of a request to set the expiry of a checkpoint."""

    ttl_seconds: int | None = None


async def list_training_runs(state: ServerState, request: Request) -> Response:
    """List the training runs."""
    offset, limit = _requested_page(request)
    live = list(state.runs.values())
    runs = await asyncio.to_thread(listing.training_runs, state.service.checkpoints, live)
    shown, cursor = listing.page(runs, offset, limit)
    return http_bodies.json_response(types.TrainingRunsResponse(training_runs=shown, cursor=cursor))


async def get_training_run(state: ServerState, request: Request) -> Response:
    """Describe one training run."""
    name = request.path_params["run"]
    saved = await _list_saved(state, name)
    return http_bodies.json_response(listing.training_run(name, saved, state.runs.get(name)))


async def list_checkpoints(state: ServerState, request: Request) -> Response:
    """List the checkpoints of a training run."""
    saved = await _list_saved(state, request.path_params["run"])
    return http_bodies.json_response(
        types.CheckpointsListResponse(checkpoints=[listing.checkpoint(each) for each in saved])
    )


async def list_user_checkpoints(state: ServerState, request: Request) -> Response:
    """List the checkpoints of all training runs."""
    offset, limit = _requested_page(request)
    saved = await asyncio.to_thread(state.service.checkpoints.entries)
    shown, cursor = listing.page(saved, offset, limit)
    return http_bodies.json_response(
        types.CheckpointsListResponse(
            checkpoints=[listing.checkpoint(each) for each in shown], cursor=cursor
        )
    )


async def delete_checkpoint(state: ServerState, request: Request) -> Response:
    """Delete a checkpoint."""
    path = (await _find_checkpoint(state, _requested_path(request))).path
    await asyncio.to_thread(state.service.checkpoints.delete, path)
    return JSONResponse(None)


async def set_checkpoint_ttl(state: ServerState, request: Request) -> Response:
    """Set or clear the expiry of a checkpoint."""
    body = await http_bodies.read_json(request, SetTtlRequest, state.settings.max_body)
    seconds = body.ttl_seconds
    check_ttl(seconds)
    path = (await _find_checkpoint(state, _requested_path(request))).path
    expires = None if seconds is None else time.time() + seconds
    await asyncio.to_thread(state.service.checkpoints.set_expiry, path, expires)
    return JSONResponse(None)


async def publish_checkpoint(_: ServerState, __: Request) -> Response:
    """Reject: a server with one user has nobody to publish for."""
    raise InputError("a checkpoint cannot be published: this server has one user.")


async def weights_info(state: ServerState, request: Request) -> Response:
    """Describe the adapter of a checkpoint."""
    body = await http_bodies.read_json(request, WeightsInfoRequest, state.settings.max_body)
    return http_bodies.json_response(
        listing.weights_info(await _find_checkpoint(state, body.tinker_path))
    )


async def list_sessions(state: ServerState, request: Request) -> Response:
    """List the open sessions, the newest first."""
    offset, limit = _requested_page(request)
    newest = sorted(state.sessions, key=lambda session: session.created, reverse=True)
    shown, _ = listing.page([session.session_id for session in newest], offset, limit)
    return http_bodies.json_response(types.ListSessionsResponse(sessions=shown))


async def get_session(state: ServerState, request: Request) -> Response:
    """Describe one session with its models and samplers."""
    session = state.sessions.get(request.path_params["session_id"])
    return http_bodies.json_response(
        types.GetSessionResponse(
            training_run_ids=[
                types.ModelID(run.model_id)
                for run in state.runs.values()
                if run.session_id == session.session_id
            ],
            sampler_ids=state.samplers.of_session(session.session_id),
            user_metadata={str(k): str(v) for k, v in session.user_metadata.items()},
            display_name=session.display_name,
        )
    )


async def _list_saved(state: ServerState, run: str) -> list[CheckpointEntry]:
    try:
        return await asyncio.to_thread(state.service.checkpoints.entries, run)
    except CheckpointError as error:  # the name is not valid, so no run has it
        raise not_found(
            "training_run_id", run, "list_training_runs lists those there are"
        ) from error


async def _find_checkpoint(state: ServerState, path: str) -> CheckpointEntry:
    check_path(path)
    run = path.removeprefix(SCHEME).partition("/")[0]
    for listed in await _list_saved(state, run):
        if listed.path == path:
            return listed
    raise not_found("path", path, "list_checkpoints lists those there are")


def _requested_path(request: Request) -> str:
    return f"{SCHEME}{request.path_params['run']}/{request.path_params['checkpoint']}"


def _requested_page(request: Request) -> tuple[int, int]:
    """Offset and limit from the query of a request."""
    values = []
    for name, default, least in (("offset", "0", 0), ("limit", "20", 1)):
        text = request.query_params.get(name, default)
        if not _WHOLE_NUMBER.fullmatch(text) or int(text) < least:
            raise InputError(f"{name} must be a whole number >= {least}, got {text!r}.")
        values.append(int(text))
    return values[0], min(values[1], _MAX_PAGE_SIZE)
