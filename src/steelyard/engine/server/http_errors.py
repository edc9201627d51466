"""HTTP errors: statuses that the SDK does not retry, each with a message of one sentence.

The SDK retries after 408, 409, 429 and every 5xx, some of them without end. A request that
cannot succeed is therefore never answered with one of these; the exception is a sequence id that
belongs to another request, which the SDK does not send, and that gets 409.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException

from steelyard.errors import ClosedError, SteelyardError
from steelyard.spec import shorten

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
_PREFIX_BYTES = 1024
_SHOWN = 1500, 500  # characters of a message: of its beginning, and of its end


class BodyTooLarge(HTTPException):
    """Raised when a body exceeds the limit; `prefix` and `suffix` hold its first and last bytes."""

    def __init__(self, detail: str, prefix: bytes, suffix: bytes = b"") -> None:
        super().__init__(TOO_LARGE, detail)
        self.prefix = prefix[:_PREFIX_BYTES]
        self.suffix = suffix[-_PREFIX_BYTES:]


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
