"""Endpoints of the SDK's `RestClient`: training runs, checkpoints and sessions.

Runs and checkpoints are those of this and of earlier servers on the same folder.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

import pydantic
from starlette.requests import Request
from tinker import types

from steelyard.engine.checkpoint_contents import check_ttl
from steelyard.engine.checkpoints import SCHEME, CheckpointEntry, Checkpoints
from steelyard.engine.server.http_messages import not_found
from steelyard.engine.server.state import ServerState, TrainingRun
from steelyard.engine.server.training_routes import check_path
from steelyard.errors import CheckpointError, InputError

T = TypeVar("T")

_OWNER = "local"
_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_MAX_PAGE_SIZE = 1000
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")


class WeightsInfoRequest(pydantic.BaseModel):
    """Body of a weights_info request."""

    tinker_path: str


class SetTtlRequest(pydantic.BaseModel):
    """Body of a request to set the expiry of a checkpoint."""

    ttl_seconds: int | None = None


async def list_training_runs(state: ServerState, request: Request) -> types.TrainingRunsResponse:
    """List the training runs."""
    offset, limit = _requested_page(request)
    live = list(state.runs.values())
    runs = await asyncio.to_thread(describe_runs, state.service.checkpoints, live)
    shown, cursor = one_page(runs, offset, limit)
    return types.TrainingRunsResponse(training_runs=shown, cursor=cursor)


async def get_training_run(state: ServerState, request: Request) -> types.TrainingRun:
    """Describe one training run."""
    name = request.path_params["run"]
    saved = await _list_saved(state, name)
    return describe_run(name, saved, state.runs.get(name))


async def list_checkpoints(state: ServerState, request: Request) -> types.CheckpointsListResponse:
    """List the checkpoints of a training run."""
    saved = await _list_saved(state, request.path_params["run"])
    return types.CheckpointsListResponse(
        checkpoints=[describe_checkpoint(entry) for entry in saved]
    )


async def list_user_checkpoints(
    state: ServerState, request: Request
) -> types.CheckpointsListResponse:
    """List the checkpoints of all training runs."""
    offset, limit = _requested_page(request)
    saved = await asyncio.to_thread(state.service.checkpoints.entries)
    shown, cursor = one_page(saved, offset, limit)
    return types.CheckpointsListResponse(
        checkpoints=[describe_checkpoint(entry) for entry in shown], cursor=cursor
    )


async def delete_checkpoint(state: ServerState, request: Request) -> None:
    """Delete a checkpoint."""
    path = (await _find_checkpoint(state, _requested_path(request))).path
    await asyncio.to_thread(state.service.checkpoints.delete, path)


async def set_checkpoint_ttl(state: ServerState, request: Request) -> None:
    """Set or clear the expiry of a checkpoint."""
    body = await state.read(request, SetTtlRequest)
    seconds = body.ttl_seconds
    check_ttl(seconds)
    path = (await _find_checkpoint(state, _requested_path(request))).path
    expires = None if seconds is None else time.time() + seconds
    await asyncio.to_thread(state.service.checkpoints.set_expiry, path, expires)


async def publish_checkpoint(_: ServerState, __: Request) -> None:
    """Reject: a server with one user has nobody to publish for."""
    raise InputError("a checkpoint cannot be published: this server has one user.")


async def weights_info(state: ServerState, request: Request) -> types.WeightsInfoResponse:
    """Describe the adapter of a checkpoint."""
    body = await state.read(request, WeightsInfoRequest)
    return describe_weights(await _find_checkpoint(state, body.tinker_path))


async def list_sessions(state: ServerState, request: Request) -> types.ListSessionsResponse:
    """List the open sessions, the newest first."""
    offset, limit = _requested_page(request)
    newest = sorted(state.sessions, key=lambda session: session.created, reverse=True)
    shown, _ = one_page([session.session_id for session in newest], offset, limit)
    return types.ListSessionsResponse(sessions=shown)


async def get_session(state: ServerState, request: Request) -> types.GetSessionResponse:
    """Describe one session with its models and samplers."""
    session = state.sessions.get(request.path_params["session_id"])
    return types.GetSessionResponse(
        training_run_ids=[
            types.ModelID(run.model_id)
            for run in state.runs.values()
            if run.session_id == session.session_id
        ],
        sampler_ids=state.samplers.of_session(session.session_id),
        user_metadata={str(k): str(v) for k, v in session.user_metadata.items()},
        display_name=session.display_name,
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


def describe_runs(checkpoints: Checkpoints, live: Sequence[TrainingRun]) -> list[types.TrainingRun]:
    """Training runs that are live or have left a checkpoint, the most recently used first."""
    saved: dict[str, list[CheckpointEntry]] = {}
    for listed in checkpoints.entries():
        saved.setdefault(listed.run, []).append(listed)
    live_by_id = {run.model_id: run for run in live}
    runs = [
        describe_run(model_id, saved.get(model_id, []), live_by_id.get(model_id))
        for model_id in [*live_by_id, *(name for name in saved if name not in live_by_id)]
    ]
    return sorted(runs, key=lambda run: run.last_request_time, reverse=True)


def describe_run(
    model_id: str, saved: Sequence[CheckpointEntry], live: TrainingRun | None
) -> types.TrainingRun:
    """Describe a training run.

    Args:
        model_id: the id of the run.
        saved: its checkpoints, the newest first.
        live: the run, if it is in training.

    Raises:
        HTTPException: the run is not live and has no checkpoint.
    """
    if live is None and not saved:
        raise not_found("training_run_id", model_id, "list_training_runs lists those there are")
    newest: dict[str, types.Checkpoint] = {}
    for listed in reversed(saved):
        newest[listed.kind] = describe_checkpoint(listed)
    if live is not None:
        info = live.client.get_info()
        base, rank = info.model_name or "", info.lora_rank
        last_used, metadata = live.last_used, dict(live.client.user_metadata)
    else:
        info_saved = saved[0].info
        base, rank = info_saved["base_model"], info_saved["lora"].get("rank")
        last_used, metadata = info_saved.get("created_at", 0), _metadata(saved[0])
    return types.TrainingRun(
        training_run_id=model_id,
        base_model=base,
        model_owner=_OWNER,
        is_lora=True,
        lora_rank=rank,
        last_request_time=_time(last_used),
        last_checkpoint=newest.get("weights"),
        last_sampler_checkpoint=newest.get("sampler_weights"),
        user_metadata=metadata,
    )


def describe_checkpoint(listed: CheckpointEntry) -> types.Checkpoint:
    """Describe a checkpoint."""
    expires = listed.info.get("expires_at")
    return types.Checkpoint(
        checkpoint_id=f"{listed.kind}/{listed.name}",
        checkpoint_type="training" if listed.kind == "weights" else "sampler",
        time=_time(listed.info.get("created_at", 0)),
        tinker_path=listed.path,
        size_bytes=listed.size,
        user_metadata=_metadata(listed),
        expires_at=None if expires is None else _time(expires),
    )


def describe_weights(listed: CheckpointEntry) -> types.WeightsInfoResponse:
    """Describe the adapter of a checkpoint, as the SDK needs it to resume training."""
    lora = listed.info["lora"]
    return types.WeightsInfoResponse(
        base_model=listed.info["base_model"],
        is_lora=True,
        lora_rank=lora.get("rank"),
        train_unembed=lora.get("train_unembed"),
        train_mlp=lora.get("train_mlp"),
        train_attn=lora.get("train_attn"),
    )


def one_page(items: Sequence[T], offset: int, limit: int) -> tuple[list[T], types.Cursor]:
    """One page of a list, and its cursor."""
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(items))
    return list(items[offset : offset + limit]), cursor


def _metadata(listed: CheckpointEntry) -> dict[str, str]:
    # A client in its own process may save other values; one of them must not hide all checkpoints.
    metadata = listed.info.get("user_metadata") or {}
    return {key: str(value) for key, value in metadata.items()}


def _time(seconds: float) -> datetime:
    # Version 0.1.0 had no limit for `ttl_seconds`, and `datetime` ends with the year 9999.
    return datetime.fromtimestamp(min(max(seconds, 0), _LAST_SECOND), UTC)
