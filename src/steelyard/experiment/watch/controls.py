"""Requests of the page that change a run: other settings, pause and continue."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from steelyard.errors import ConfigError, RunError
from steelyard.experiment.run_changes import (
    continue_run,
    describe_settings,
    pause_run,
    request_settings,
)
from steelyard.experiment.secrets import redact
from steelyard.experiment.watch.run_index import RunIndex

_MAX_BYTES = 64 * 1024
ACTIONS = ("set", "pause", "continue")  # the last part of the path of a request


def settings_of(folder: Path) -> dict[str, Any]:
    """Settings of a run that can be changed, as JSON; empty if its config is damaged."""
    try:
        return {"settings": redact(describe_settings(folder))}
    except (ConfigError, RunError):
        return {"settings": {}}


async def change(request: Request, index: RunIndex) -> Response:
    """Change a run: `{"run": name}`, for `set` with `"settings"`, values by key.

    `AccessControl` lets only the page itself send one.
    """
    action = request.url.path.rpartition("/")[2]
    body = await _read(request)
    settings = body.get("settings", {})
    if not isinstance(settings, dict):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "settings must be a table.")
    folder = await run_in_threadpool(index.path, str(body.get("run", "")))
    try:
        await run_in_threadpool(_act, action, folder, settings)
    except (ConfigError, RunError) as error:
        return JSONResponse({"detail": redact(str(error))}, status_code=HTTPStatus.CONFLICT)
    return JSONResponse(settings_of(folder))


def _act(action: str, folder: Path, settings: dict[str, Any]) -> None:
    if action == "set":
        request_settings(folder, settings)
    elif action == "pause":
        pause_run(folder)
    else:
        continue_run(folder)


async def _read(request: Request) -> dict[str, Any]:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MAX_BYTES:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {_MAX_BYTES} bytes are read."
            )
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body must be a JSON object.")
    return body
