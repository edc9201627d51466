"""ASGI application of the page: its files, the views of runs as JSON, and the events."""

from __future__ import annotations

import asyncio
import json
import math
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from steelyard.engine.server.http_server import AllowedHosts
from steelyard.errors import RunError
from steelyard.experiment.watch.controls import ACTIONS, change, settings_of
from steelyard.experiment.watch.events import Followed, events, list_runs
from steelyard.experiment.watch.records import RECORDS
from steelyard.experiment.watch.run_view import RunViews
from steelyard.experiment.watch.security import AccessControl, Tokens
from steelyard.experiment.watch.series import Position

STATIC = Path(__file__).parent / "static"
_MAX_FOLLOWED = 32


def make_app(
    views: RunViews, tokens: Tokens, hosts: AllowedHosts, stopping: asyncio.Event
) -> Starlette:
    """Application that shows the runs of `views`; event streams end when `stopping` is set."""

    async def page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def runs(_: Request) -> Response:
        return _json(await run_in_threadpool(list_runs, views))

    async def run(request: Request) -> Response:
        query = request.query_params
        smoothing = _smoothing(query.get("smoothing", "0"))
        groups = query.getlist("group")
        name = query.get("run", "")
        return _json(await run_in_threadpool(views.view, name, smoothing=smoothing, groups=groups))

    async def records(request: Request) -> Response:
        path = await run_in_threadpool(views.index.path, request.query_params.get("run", ""))
        read = RECORDS.get(request.path_params["kind"])
        if read is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"known are {', '.join(RECORDS)}.")
        return _json(await run_in_threadpool(read, path))

    async def settings(request: Request) -> Response:
        path = await run_in_threadpool(views.index.path, request.query_params.get("run", ""))
        return _json(await run_in_threadpool(settings_of, path))

    async def change_run(request: Request) -> Response:
        return await change(request, views.index)

    async def stream(request: Request) -> Response:
        followed = _followed(request)
        return StreamingResponse(events(views, followed, stopping), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/runs", runs),
            Route("/api/run", run),
            Route("/api/records/{kind}", records),
            Route("/api/settings", settings),
            *(Route(f"/api/{action}", change_run, methods=["POST"]) for action in ACTIONS),
            Route("/api/events", stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(AccessControl, tokens=tokens, hosts=hosts)],
        exception_handlers={HTTPException: _error, RunError: _error},
    )


def _json(content: Any) -> Response:
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")


def _smoothing(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 <= factor < 1:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST, f"smoothing must be a number from 0 to below 1, got {text!r}."
        )
    return factor


def _followed(request: Request) -> list[Followed]:
    """Runs of the query: `run` and `position`, each as often as there are runs."""
    query = request.query_params
    try:
        found = [
            Followed(name, Position.parse(position))
            for name, position in zip(query.getlist("run"), query.getlist("position"), strict=True)
        ]
    except ValueError:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST, "each run must have a position, that of its view or event."
        ) from None
    return found[:_MAX_FOLLOWED]


def _error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, status_code=error.status_code)
    return JSONResponse({"detail": str(error)}, status_code=HTTPStatus.NOT_FOUND)
