"""A request and its reply: bodies within limits, and replies in the SDK's forms."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from tinker import types

from steelyard.engine.server.codec import read_json, unpacked
from steelyard.engine.server.futures import JSON, Answer, ServerFuture
from steelyard.engine.server.http_errors import BAD_REQUEST, Oversized

M = TypeVar("M", bound=pydantic.BaseModel)
T = TypeVar("T")


async def body_of(request: Request, limit: int) -> bytes:
    """The body of a request, unpacked.

    Raises:
        HTTPException: it is larger than it may be, or breaks off.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                start = b"".join([*parts[:1], part])
                raise Oversized(f"the body must have at most {limit} bytes, got more.", start)
            parts.append(part)
    except ClientDisconnect as error:
        raise HTTPException(BAD_REQUEST, "the body must be whole, and it broke off.") from error
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if not encoding:
        return b"".join(parts)
    return await asyncio.to_thread(unpacked, b"".join(parts), encoding, limit)


async def json_of(request: Request, model: type[M], limit: int) -> M:
    """A request in JSON.

    Raises:
        HTTPException: it is none of this kind.
    """
    return await asyncio.to_thread(read_json, model, await body_of(request, limit))


async def while_there(request: Request, waiting: Coroutine[Any, Any, T]) -> T | None:
    """What `waiting` gives; None if the client has gone before.

    The body must have been read: what comes next is the end of the connection.
    """
    gone = asyncio.ensure_future(request.receive())
    work = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        gone.cancel()
        work.cancel()


def reply(model: pydantic.BaseModel) -> Response:
    """A reply in JSON."""
    return Response(model.model_dump_json(), media_type=JSON)


def handed_out(answer: Answer) -> Response:
    """What a ticket was exchanged for."""
    return Response(answer.body, media_type=answer.media_type)


def promise(
    ticket: ServerFuture, model_id: str | None = None, sequences: list[str] | None = None
) -> Response:
    """A ticket's name, to come back with."""
    return reply(
        types.UntypedAPIFuture(
            request_id=ticket.name, model_id=model_id, sample_sequence_ids=sequences
        )
    )
