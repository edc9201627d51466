"""HTTP bodies: request bodies read within limits, and responses in the SDK's formats."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from tinker import types

from steelyard.engine.server.codec import decompress, parse_json
from steelyard.engine.server.futures import JSON, EncodedResult, ServerFuture
from steelyard.engine.server.http_errors import BAD_REQUEST, BodyTooLarge

M = TypeVar("M", bound=pydantic.BaseModel)
T = TypeVar("T")

_KEPT_BYTES = 1024  # at either end of a body that is too large
_DISCARDED_BYTES = 2**20  # that are read behind twice the limit


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request and decompress it.

    Raises:
        HTTPException: the body is too large, incomplete, or not encoded as it declares.
    """
    chunks: list[bytes] = []
    size, prefix = 0, b""
    try:
        async for chunk in request.stream():
            size += len(chunk)
            chunks.append(chunk)
            if size > max_bytes:
                # The first and last bytes identify the request, so that those behind it can run.
                # It is read to its end, within reason, and not kept.
                body = b"".join(chunks)
                prefix, chunks = prefix or body[:_KEPT_BYTES], [body[-_KEPT_BYTES:]]
            if size > 2 * max_bytes + _DISCARDED_BYTES:
                break
    except ClientDisconnect as error:
        raise HTTPException(BAD_REQUEST, "the body must be whole, and it broke off.") from error
    if size > max_bytes:
        raise BodyTooLarge(
            f"the body must have at most {max_bytes} bytes, got more.", prefix, chunks[0]
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if not encoding:
        return b"".join(chunks)
    return await asyncio.to_thread(decompress, b"".join(chunks), encoding, max_bytes)


async def read_json(request: Request, model: type[M], max_bytes: int) -> M:
    """Read a request in JSON.

    Raises:
        HTTPException: the body is too large or not a valid `model`.
    """
    return await asyncio.to_thread(parse_json, model, await read_body(request, max_bytes))


async def wait_while_connected(request: Request, waiting: Coroutine[Any, Any, T]) -> T | None:
    """Await `waiting`; None if the client disconnects first.

    The body of the request must have been read: the next ASGI message is then the disconnect.
    """
    disconnected = asyncio.ensure_future(request.receive())
    task = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait({disconnected, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        disconnected.cancel()
        task.cancel()


def json_response(model: pydantic.BaseModel) -> Response:
    """Response with a model in JSON."""
    return Response(model.model_dump_json(), media_type=JSON)


def result_response(result: EncodedResult) -> Response:
    """Response with the result of a future."""
    return Response(result.body, media_type=result.media_type)


def future_response(
    future: ServerFuture, model_id: str | None = None, sequence_ids: list[str] | None = None
) -> Response:
    """Response with the request id of a future, for the client to fetch the result with."""
    return json_response(
        types.UntypedAPIFuture(
            request_id=future.request_id, model_id=model_id, sample_sequence_ids=sequence_ids
        )
    )
