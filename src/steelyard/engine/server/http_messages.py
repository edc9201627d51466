"""Messages of HTTP: bodies read within limits, responses, and errors that the SDK understands.

The SDK retries after 408, 409, 429 and every 5xx, some of them without end. A request that
cannot succeed is therefore never answered with one of these; the exception is a sequence id that
belongs to another request, which the SDK does not send, and that gets 409.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic
import zstandard
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from steelyard.errors import ClosedError, SteelyardError
from steelyard.spec.error_messages import shorten

JSON, PROTOBUF = "application/json", "application/x-protobuf"

BAD_REQUEST = 400
UNAUTHORIZED = 401
FORBIDDEN = 403
NOT_FOUND = 404
CONFLICT = 409
GONE = 410
TOO_LARGE = 413
MISDIRECTED = 421
ENGINE_FAILED = 500

STOPPING = "the server is stopping."
_SHOWN = 1500, 500  # characters of a message: of its beginning, and of its end

M = TypeVar("M", bound=pydantic.BaseModel)
T = TypeVar("T")

_KEPT_BYTES = 1024  # at either end of a body that is too large
_DISCARDED_BYTES = 2**20  # that are read behind twice the limit


class BodyTooLarge(HTTPException):
    """Raised when a body exceeds the limit; `prefix` and `suffix` hold its first and last bytes."""

    def __init__(self, detail: str, prefix: bytes, suffix: bytes = b"") -> None:
        super().__init__(TOO_LARGE, detail)
        self.prefix = prefix[:_KEPT_BYTES]
        self.suffix = suffix[-_KEPT_BYTES:]


def to_http_exception(error: Exception) -> HTTPException:
    """HTTP exception that reports an error caused by a request."""
    if isinstance(error, HTTPException):
        return error
    return HTTPException(BAD_REQUEST, one_line(error))


def is_client_error(error: BaseException) -> bool:
    """Return whether the request caused an error, not the engine or its shutdown."""
    from_request = isinstance(error, SteelyardError | HTTPException)
    return from_request and not isinstance(error, ClosedError)


def one_line(error: BaseException) -> str:
    """Message of an error on one line, ending with a full stop.

    The middle of a long one is left out: a request may hold names of megabytes, and a message
    repeats them.
    """
    message = error.detail if isinstance(error, HTTPException) else str(error)
    line = " ".join(shorten(message, *_SHOWN).split()) or type(error).__name__
    return line if line.endswith(".") else f"{line}."


def conflict(field: str, number: str, before: str, now: str) -> HTTPException:
    """409 error for a sequence number that belongs to another request of the client."""
    return HTTPException(
        CONFLICT,
        f"{field} must be used once, and {number} was {before}, got {now}.",
        # The SDK's HTTP client retries after 409 unless it gets this header.
        headers={"x-should-retry": "false"},
    )


def not_found(field: str, value: str, cure: str) -> HTTPException:
    """404 error for a name that does not exist on this server."""
    return HTTPException(NOT_FOUND, f"{field} must be one that is here, got {value!r}: {cure}.")


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


def decompress(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress the body of a request.

    Reads at most `max_bytes` + 1 bytes of output, so that a small body that expands without end
    cannot fill the memory.

    Raises:
        HTTPException: the result is too large, or the body is not encoded as it declares.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise HTTPException(
            BAD_REQUEST, f"Content-Encoding must be zstd or identity, got {encoding!r}."
        )
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise HTTPException(
            BAD_REQUEST, f"the body must be zstd, and it is not: {error}"
        ) from error
    if len(plain) > max_bytes:
        raise BodyTooLarge(
            f"the body must have at most {max_bytes} bytes unpacked, got more.", plain
        )
    return plain


def parse_json(model: type[M], body: bytes) -> M:
    """Parse a request in JSON.

    Raises:
        HTTPException: the body is not a valid `model`.
    """
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(key) for key in first["loc"])
        where = f"{model.__name__}.{place}" if place else f"a {model.__name__}"
        raise HTTPException(BAD_REQUEST, f"{where} is not right: {first['msg']}.") from error


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


@dataclass(frozen=True)
class EncodedResult:
    """Result of a request, encoded for the wire.

    Attributes:
        body: the bytes of the response.
        media_type: the content type of the body.
        failed: whether the body describes a failure.
    """

    body: bytes
    media_type: str = JSON
    failed: bool = False

    def response(self) -> Response:
        """Response with the result."""
        return Response(self.body, media_type=self.media_type)


def json_response(body: pydantic.BaseModel | None) -> Response:
    """Response with a model in JSON."""
    return Response("null" if body is None else body.model_dump_json(), media_type=JSON)
