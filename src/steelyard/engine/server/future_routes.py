"""Endpoints that fetch or cancel the results of earlier requests."""

from __future__ import annotations

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest
from tinker.types.futures_retrieve_response import FuturesRetrieveResponse
from tinker.types.try_again_response import TryAgainResponse

from steelyard.engine.server import http_bodies
from steelyard.engine.server.http_errors import GONE, STOPPING, not_found
from steelyard.engine.server.state import ServerState

# Not an error: with this status the SDK polls again at once.
_TRY_AGAIN = 408


class CancelFutureRequest(pydantic.BaseModel):
    """Body of a cancel_future request."""

    request_id: str


async def retrieve_future(state: ServerState, request: Request) -> Response:
    """Return the result of a request; hold the connection until it is available."""
    body = await http_bodies.read_json(request, FutureRetrieveRequest, state.settings.max_body)
    future = state.futures.get(body.request_id)
    if future is None:
        state.sessions.check_instance("request_id", body.request_id)
        raise not_found("request_id", body.request_id, "results are kept for a while only")
    with state.sessions.polling(future.session_id):
        waiting = future.wait(state.settings.poll_seconds)
        result = await http_bodies.wait_while_connected(request, waiting)
    if result is not None:
        return http_bodies.result_response(result)
    pending = TryAgainResponse(request_id=future.request_id, queue_state="active")
    return JSONResponse(pending.model_dump(), status_code=_TRY_AGAIN)


async def retrieve_futures(state: ServerState, request: Request) -> Response:
    """Return which requests of a sampler have completed; hold the connection until one has."""
    body = await http_bodies.read_json(request, FuturesRetrieveRequest, state.settings.max_body)
    if state.stopping:
        raise HTTPException(GONE, STOPPING)
    sampler = state.get_sampler(body.target.sampling_session_id)
    for request_id in body.retrieved_request_ids:  # acknowledged, so the results can go
        future = state.futures.get(request_id)
        if future is not None and request_id.startswith(f"{sampler.sampler_id}:"):
            state.futures.drop(future)
    log = sampler.completions_of(body.target.cloned_sampler_id)
    with state.sessions.polling(sampler.session_id):
        waiting = log.read_after(body.prev_cursor, state.settings.poll_seconds)
        entries = await http_bodies.wait_while_connected(request, waiting)
    completions, cursor = entries or ([], body.prev_cursor)
    return http_bodies.json_response(
        FuturesRetrieveResponse(completions=completions, cursor=cursor)
    )


async def cancel_future(state: ServerState, request: Request) -> Response:
    """Cancel a sampling request that has not started."""
    body = await http_bodies.read_json(request, CancelFutureRequest, state.settings.max_body)
    future = state.futures.get(body.request_id)
    if future is not None and future.request_type == "asample":
        future.cancel("the request was cancelled.")
    return JSONResponse(None)
