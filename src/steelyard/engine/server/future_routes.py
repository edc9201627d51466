"""Requests for the answers to other requests."""

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

# Not a refusal: with this status the SDK asks again at once.
_TRY_AGAIN = 408


class Cancel(pydantic.BaseModel):
    """Which request is not wanted any more."""

    request_id: str


async def retrieve_future(desk: ServerState, request: Request) -> Response:
    """The answer to one request; held until it is there, for a while."""
    asked = await http_bodies.json_of(request, FutureRetrieveRequest, desk.settings.max_body)
    ticket = desk.tickets.get(asked.request_id)
    if ticket is None:
        raise not_found("request_id", asked.request_id, "answers are kept for a while only")
    with desk.sessions.waiting(ticket.session_id):
        answer = await http_bodies.while_there(request, ticket.wait(desk.settings.poll_seconds))
    if answer is not None:
        return http_bodies.handed_out(answer)
    pending = TryAgainResponse(request_id=ticket.name, queue_state="active")
    return JSONResponse(pending.model_dump(), status_code=_TRY_AGAIN)


async def retrieve_futures(desk: ServerState, request: Request) -> Response:
    """Which requests of a sampler are done; held until one is, for a while."""
    asked = await http_bodies.json_of(request, FuturesRetrieveRequest, desk.settings.max_body)
    if desk.stopping:
        raise HTTPException(GONE, STOPPING)
    sampler = desk.samplers.get(asked.target.sampling_session_id)
    for name in asked.retrieved_request_ids:
        ticket = desk.tickets.get(name)
        if ticket is not None and name.startswith(f"{sampler.sampler_id}:"):
            desk.tickets.drop(ticket)
    news = sampler.news_of(asked.target.cloned_sampler_id)
    with desk.sessions.waiting(sampler.session_id):
        waiting = news.after(asked.prev_cursor, desk.settings.poll_seconds)
        found = await http_bodies.while_there(request, waiting)
    completions, cursor = found or ([], asked.prev_cursor)
    return http_bodies.reply(FuturesRetrieveResponse(completions=completions, cursor=cursor))


async def cancel_future(desk: ServerState, request: Request) -> Response:
    """Give up a request that was not begun."""
    asked = await http_bodies.json_of(request, Cancel, desk.settings.max_body)
    ticket = desk.tickets.get(asked.request_id)
    if ticket is not None and ticket.verb == "asample":
        ticket.abandon("the request was cancelled.")
    return JSONResponse(None)
