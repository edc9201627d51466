"""ASGI application of the page: its files, documents of runs, events, and changes of runs."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
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
from steelyard.errors import ConfigError, RunError
from steelyard.experiment.page.load import METRICS
from steelyard.experiment.page.records import RECORDS
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.page.run_views import RunViews
from steelyard.experiment.page.security import AccessControl, Tokens
from steelyard.experiment.page.series import Position, numbers, rows_after
from steelyard.experiment.run.changes import (
    continue_run,
    describe_settings,
    pause_run,
    request_settings,
)
from steelyard.output.redaction import redact
from steelyard.output.step_metrics import short_reason, skipped_terms

STATIC = Path(__file__).parent / "static"
_MAX_FOLLOWED = 32
_MAX_BODY = 64 * 1024
ACTIONS = ("set", "pause", "continue")  # the last part of the path of a request


_POLL_SECONDS = 0.5
_TICKS_OF_SILENCE = 30  # after which a comment is sent, so that a proxy keeps the connection
_MAX_BYTES = 2**21  # of the metrics of a run in one event


def make_app(
    views: RunViews, tokens: Tokens, hosts: AllowedHosts, stopping: asyncio.Event
) -> Starlette:
    """Application that shows the runs of `views`; event streams end when `stopping` is set."""

    async def page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def runs(_: Request) -> Response:
        return _json(await run_in_threadpool(views.list))

    async def run(request: Request) -> Response:
        query = request.query_params
        smoothing = _smoothing(query.get("smoothing", "0"))
        groups = query.getlist("group")
        name = query.get("run", "")
        return _json(await run_in_threadpool(views.view, name, smoothing=smoothing, groups=groups))

    async def summary(request: Request) -> Response:
        name = request.query_params.get("run", "")
        return _json(await run_in_threadpool(views.summary, name))

    async def comparison(request: Request) -> Response:
        query = request.query_params
        names, group = query.getlist("run"), query.get("group")
        smoothing = _smoothing(query.get("smoothing", "0"))
        return _json(await run_in_threadpool(views.compare, names, group, smoothing=smoothing))

    async def records(request: Request) -> Response:
        name, kind = request.query_params.get("run", ""), request.path_params["kind"]
        return _json(await run_in_threadpool(_records, views, name, kind))

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
            Route("/api/summary", summary),
            Route("/api/compare", comparison),
            Route("/api/records/{kind}", records),
            Route("/api/settings", settings),
            *(Route(f"/api/{action}", change_run, methods=["POST"]) for action in ACTIONS),
            Route("/api/events", stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(AccessControl, tokens=tokens, hosts=hosts)],
        exception_handlers={HTTPException: _error, RunError: _error},
    )


def _records(views: RunViews, name: str, kind: str) -> Any:
    if kind == "findings":
        return views.findings(name)
    path, read = views.index.path(name), RECORDS.get(kind)
    if read is None:
        raise HTTPException(HTTPStatus.NOT_FOUND, f"known are findings, {', '.join(RECORDS)}.")
    return read(path)


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
        followed = [
            Followed(name, Position.parse(position))
            for name, position in zip(query.getlist("run"), query.getlist("position"), strict=True)
        ]
    except ValueError:
        raise HTTPException(
            HTTPStatus.BAD_REQUEST, "each run must have a position, that of its view or event."
        ) from None
    return followed[:_MAX_FOLLOWED]


def _error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": error.detail}, status_code=error.status_code)
    return JSONResponse({"detail": str(error)}, status_code=HTTPStatus.NOT_FOUND)


@dataclass
class Followed:
    """A run whose new rows are sent, and up to where the page has its metrics."""

    name: str
    position: Position


async def events(
    views: RunViews, followed: Sequence[Followed], stopping: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yield events until `stopping` is set.

    `runs` is the list, at the beginning and whenever it changes; `rows` has new rows of a run
    and the terms skipped there; `reset` says that a run must be loaded again, since rows that were
    sent were replaced.
    """
    last_list = b""
    ticks = 0
    following = list(followed)
    yield b"retry: 2000\n\n"
    while not stopping.is_set():
        listed = _event("runs", await run_in_threadpool(views.list))
        news = await run_in_threadpool(_news, views, following)
        if listed != last_list:
            news = [listed, *news]
            last_list = listed
        for event in news:
            yield event
        ticks = 0 if news else ticks + 1
        if ticks and ticks % _TICKS_OF_SILENCE == 0:
            yield b": nothing new\n\n"
        try:
            await asyncio.wait_for(stopping.wait(), _POLL_SECONDS)
        except TimeoutError:
            continue


def _news(views: RunViews, following: list[Followed]) -> list[bytes]:
    news = []
    for run in list(following):
        try:
            path = views.index.path(run.name) / METRICS
        except RunError:  # removed: the list says so
            following.remove(run)
            continue
        added = rows_after(path, run.position, _MAX_BYTES)
        if added is None:
            news.append(_event("reset", {"run": run.name}))
            following.remove(run)
            continue
        rows, run.position = added
        if rows:
            data = {"run": run.name, "position": str(run.position)}
            shown = {"rows": [numbers(row) for row in rows], "skipped": _skipped(rows)}
            news.append(_event("rows", data | shown))
    return news


def _skipped(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"term": term, "reason": short_reason(redact(reason)), "step": row["step"]}
        for row in rows
        for term, reason in skipped_terms(row).items()
    ]


def _event(kind: str, data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


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
        if len(content) > _MAX_BODY:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {_MAX_BODY} bytes are read."
            )
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body must be a JSON object.")
    return body
