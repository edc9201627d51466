"""How the server says no: a status the SDK does not retry, and one sentence.

The SDK tries again after 408, 409, 429 and every 5xx, some of them for ever, so a request that
cannot succeed is never answered with one of these.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException

from steelyard.errors import ClosedError, SteelyardError

BAD_REQUEST = 400
UNAUTHORIZED = 401
FORBIDDEN = 403
NOT_FOUND = 404
GONE = 410
TOO_LARGE = 413
ENGINE_FAILED = 500

STOPPING = "the server is stopping."
_START = 1024


class Oversized(HTTPException):
    """A body is over the limit; `start` is how it begins."""

    def __init__(self, detail: str, start: bytes) -> None:
        super().__init__(TOO_LARGE, detail)
        self.start = start[:_START]


def refusal(error: Exception) -> HTTPException:
    """What to answer when `error` was raised by what a client sent."""
    if isinstance(error, HTTPException):
        return error
    return HTTPException(BAD_REQUEST, sentence(error))


def is_clients_fault(error: BaseException) -> bool:
    """Whether an error comes from what was asked, not from the engine or its end."""
    asked = isinstance(error, SteelyardError | HTTPException)
    return asked and not isinstance(error, ClosedError)


def sentence(error: BaseException) -> str:
    """What an error says, in one line."""
    said = error.detail if isinstance(error, HTTPException) else str(error)
    line = " ".join(said.split()) or type(error).__name__
    return line if line.endswith(".") else f"{line}."


def not_found(what: str, name: str, cure: str) -> HTTPException:
    """There is no such thing."""
    return HTTPException(NOT_FOUND, f"{what} must be one that is here, got {name!r}: {cure}.")
