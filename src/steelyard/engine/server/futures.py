"""Futures of the wire protocol: results that clients fetch with a later request.

A request that takes time is answered at once with a request id. The client fetches the result
with `retrieve_future`, which is held open until the result is available. Everything in this
module runs on the event loop; only the callbacks of engine futures run on engine threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from tinker.types import RequestErrorCategory, RequestFailedResponse

from steelyard.engine.server.http_errors import (
    BAD_REQUEST,
    ENGINE_FAILED,
    STOPPING,
    conflict,
    is_client_error,
    one_line,
    to_http_exception,
)
from steelyard.errors import ClosedError

JSON, PROTOBUF = "application/json", "application/x-protobuf"
_MAX_FUTURES = 8192

T = TypeVar("T")


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


@dataclass(eq=False)
class ServerFuture:
    """A request that is queued, running or done.

    Attributes:
        request_id: the id with which the client fetches the result.
        request_type: the type of the request, such as `optim_step`.
        session_id: the id of the client's session.
        payload: a hash of the request's content; None if a repeated request is not compared.
        engine_future: the engine's future while the engine has the request.
        result: None until it is available.
        rejection: status and message, if the request was answered with an HTTP error.
        fetched_at: time of the first fetch, by the monotonic clock.
    """

    request_id: str
    request_type: str
    session_id: str
    payload: bytes | None = None
    engine_future: Future[Any] | None = None
    result: EncodedResult | None = None
    rejection: tuple[int, str] | None = None
    fetched_at: float | None = None
    _done: asyncio.Event = field(default_factory=asyncio.Event)
    _callbacks: list[Callable[[ServerFuture], None]] = field(default_factory=list)

    def settle(self, result: EncodedResult) -> None:
        """Set the result and call the callbacks; calls after the first do nothing."""
        if self.result is None:
            self.result = result
            self._done.set()
            for callback in self._callbacks:
                callback(self)
            # Callbacks and the engine future refer to this future: clear them, or the cycle keeps
            # what they hold alive, possibly a model.
            self.engine_future, self._callbacks = None, []

    def add_done_callback(self, callback: Callable[[ServerFuture], None]) -> None:
        """Call `callback` with this future when its result is set."""
        self._callbacks.append(callback)

    def settle_from(
        self,
        engine_future: Future[T],
        encode: Callable[[T], EncodedResult],
        on_success: Callable[[T], None] = lambda _: None,
    ) -> None:
        """Settle with the outcome of an engine future.

        Args:
            engine_future: the future to wait for.
            encode: encodes its value, on the engine's thread.
            on_success: called with its value, on the event loop, before the result is set.
        """
        loop = asyncio.get_running_loop()
        self.engine_future = engine_future

        def finish(values: list[T], result: EncodedResult) -> None:
            for value in values:
                on_success(value)
            self.settle(result)

        def on_done(done: Future[T]) -> None:
            result = _encode_outcome(done, encode)
            values = [] if result.failed else [done.result()]
            # RuntimeError: the loop is closed, as the server has stopped and no client waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, values, result)

        engine_future.add_done_callback(on_done)

    def reject(self, error: Exception) -> None:
        """Settle with an error that was raised before the engine began.

        Raises:
            Exception: `error`, if the request caused it. Any other error is reported only when
                the client fetches the result: a status of 500 would make the SDK retry.
        """
        self.settle(_encode_error(error))
        if is_client_error(error):
            # Not the exception itself: its traceback would keep the request alive, which may be
            # large.
            self.rejection = to_http_exception(error).status_code, one_line(error)
            self.fetched_at = time.monotonic()
            raise error

    def check_repeated(self, request_type: str, payload: bytes | None) -> None:
        """Check that a request with the id of this one is the same request, sent again.

        Raises:
            HTTPException: it is another one; or it was rejected, and is again.
        """
        if request_type == self.request_type:
            now = "another one with other contents"
            same = payload is None or self.payload in (None, payload)
        else:
            now, same = f"a {request_type}", False
        if not same:
            owner, _, number = self.request_id.rpartition(":")
            raise conflict("seq_id", number, f"a {self.request_type} of {owner}", now)
        if self.rejection is not None:
            raise HTTPException(*self.rejection)

    def cancel(
        self, reason: str, category: RequestErrorCategory = RequestErrorCategory.User
    ) -> None:
        """Fail the request with `reason` unless the engine is already running it."""
        if self.engine_future is None or self.engine_future.cancel():
            self.settle(failed_result(reason, category))

    async def wait(self, seconds: float) -> EncodedResult | None:
        """Result of the request, or None if it takes longer than `seconds`."""
        try:
            await asyncio.wait_for(self._done.wait(), seconds)
        except TimeoutError:
            return None
        if self.fetched_at is None:
            self.fetched_at = time.monotonic()
        return self.result


class ServerFutures:
    """All futures of a server, by request id."""

    def __init__(self) -> None:
        self._by_id: dict[str, ServerFuture] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[ServerFuture]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: str) -> ServerFuture | None:
        """Future of a request, or None if there is none or it was dropped."""
        return self._by_id.get(request_id)

    def create(
        self, request_id: str, request_type: str, session_id: str, payload: bytes | None = None
    ) -> ServerFuture:
        """Create a future; at the limit, drop the oldest one that has a result."""
        if len(self) >= _MAX_FUTURES:
            for future in self._by_id.values():
                if future.result is not None:
                    self.drop(future)
                    break
        future = ServerFuture(request_id, request_type, session_id, payload)
        self._by_id[request_id] = future
        return future

    def drop(self, future: ServerFuture) -> None:
        """Remove a future; its result can no longer be fetched."""
        self._by_id.pop(future.request_id, None)

    def drop_fetched(self, seconds: float) -> None:
        """Drop the futures whose results were fetched more than `seconds` ago."""
        now = time.monotonic()
        for future in self:
            if future.fetched_at is not None and now - future.fetched_at > seconds:
                self.drop(future)


def failed_result(reason: str, category: RequestErrorCategory) -> EncodedResult:
    """Result that makes the SDK raise at once.

    It is sent with the HTTP status 200 and carries the status of the failure in its body: an HTTP
    status of 500 would make the SDK retry without end.
    """
    body = RequestFailedResponse(error=reason, category=category).model_dump(mode="json")
    by_client = category is RequestErrorCategory.User
    body["status"] = BAD_REQUEST if by_client else ENGINE_FAILED
    return EncodedResult(json.dumps(body).encode(), failed=True)


def _encode_outcome(
    engine_future: Future[T], encode: Callable[[T], EncodedResult]
) -> EncodedResult:
    try:
        return encode(engine_future.result())
    except CancelledError:  # the engine was closed: `ServerFuture.cancel` sets its own reason first
        return failed_result(STOPPING, RequestErrorCategory.Server)
    except Exception as error:  # noqa: BLE001 - reported to the client, whatever it is
        return _encode_error(error)


def _encode_error(error: Exception) -> EncodedResult:
    if is_client_error(error):
        return failed_result(one_line(error), RequestErrorCategory.User)
    if isinstance(error, ClosedError):
        return failed_result(STOPPING, RequestErrorCategory.Server)
    reason = f"the engine failed: {type(error).__name__}: {one_line(error)}"
    return failed_result(reason, RequestErrorCategory.Server)
