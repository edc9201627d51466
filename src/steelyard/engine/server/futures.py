"""Futures of the wire protocol: results that clients fetch with a later request.

A request that takes time is answered at once with a request id. The client fetches the result
with `retrieve_future`, which is held open until the result is available. Everything in this
module runs on the event loop; only the callbacks of engine futures run on engine threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from tinker.types import RequestErrorCategory, RequestFailedResponse, UntypedAPIFuture

from steelyard.engine.server.http_messages import (
    BAD_REQUEST,
    ENGINE_FAILED,
    FORBIDDEN,
    STOPPING,
    EncodedResult,
    conflict,
    is_client_error,
    one_line,
    to_http_exception,
)
from steelyard.errors import ClosedError

_MAX_FUTURES = 8192
_START_NUMBERS = itertools.count()

T = TypeVar("T")


@dataclass(eq=False)
class ServerFuture:
    """A request that is queued, running or done.

    Attributes:
        request_id: the id with which the client fetches the result.
        request_type: the type of the request, such as `optim_step`.
        session_id: the id of the client's session.
        payload: a hash of the request's content; None if a repeated request is not compared.
        engine_future: the engine's future while the engine has the request.
        start_number: counts the requests that the engine was given; infinite before.
        result: None until it is available.
        rejection: status and message, if the request was answered with an HTTP error.
        fetched_at: time of the first fetch, by the monotonic clock.
    """

    request_id: str
    request_type: str
    session_id: str
    payload: bytes | None = None
    engine_future: Future[Any] | None = None
    start_number: float = math.inf
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

    def reference(
        self, model_id: str | None = None, sequence_ids: list[str] | None = None
    ) -> UntypedAPIFuture:
        """Answer to the request: the request id, for the client to fetch the result with."""
        return UntypedAPIFuture(
            request_id=self.request_id, model_id=model_id, sample_sequence_ids=sequence_ids
        )

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
        self.start_number = next(_START_NUMBERS)

        def finish(values: list[T], result: EncodedResult) -> None:
            for value in values:
                on_success(value)
            self.settle(result)

        def on_done(settled: Future[T]) -> None:
            result = _encode_outcome(settled, encode)
            values = [] if result.failed else [settled.result()]
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


# Starts a request; if it returns a future, later requests wait until that is done.
Start = Callable[[], Future[Any] | None]


class Sequencer:
    """Holds requests until all requests with smaller sequence ids have started.

    A request is created (`create_future`), validated concurrently with others, then either
    `mark_ready` or `skip`ped. Invariant: every id below `_next` has started, was skipped or has
    failed, and `_ready` holds only ids >= `_next`.

    Args:
        model_id: the id of the model.
        futures: the futures of the server.
        max_waiting: how far ahead of the next request a sequence id can be.
    """

    def __init__(self, model_id: str, futures: ServerFutures, max_waiting: int) -> None:
        self._model_id = model_id
        self._futures = futures
        self._max_waiting = max_waiting
        self._next = 1
        # None: the request was rejected, and its sequence id starts nothing.
        self._ready: dict[int, Start | None] = {}
        self._blocked_since: float | None = None
        self._held_by: Future[Any] | None = None

    @property
    def next_free(self) -> int:
        """Sequence id after all that have arrived, for a request without one."""
        seq_id = max([self._next - 1, *self._ready]) + 1
        while self._futures.get(self._request_id(seq_id)) is not None:
            seq_id += 1
        return seq_id

    def find(
        self, seq_id: int, request_type: str, payload: bytes | None = None
    ) -> ServerFuture | None:
        """Future of a request that was sent before, or None if the request is new.

        Args:
            seq_id: the sequence id.
            request_type: the type of the request.
            payload: a hash of its content.

        Raises:
            HTTPException: the sequence id belongs to another request, is in the past or is too
                far ahead; or the request was rejected before.
        """
        future = self._futures.get(self._request_id(seq_id))
        if future is not None:
            future.check_repeated(request_type, payload)
        if future is None and seq_id < self._next:
            raise HTTPException(
                BAD_REQUEST,
                f"seq_id must be {self._next} or more, the next of {self._model_id}, "
                f"got {seq_id}, which has been and is not kept.",
            )
        if seq_id >= self._next + self._max_waiting:
            raise HTTPException(
                FORBIDDEN,
                f"seq_id must be less than {self._next + self._max_waiting}, as at most "
                f"{self._max_waiting} requests of a model may wait, got {seq_id}.",
            )
        return future

    def create_future(
        self, seq_id: int, request_type: str, session_id: str, payload: bytes | None = None
    ) -> ServerFuture:
        """Create the future of a new request."""
        return self._futures.create(self._request_id(seq_id), request_type, session_id, payload)

    def mark_ready(self, seq_id: int, start: Start) -> None:
        """Call `start` as soon as all requests with smaller sequence ids have started.

        If one of them returned a future when it was started, this waits until that is done. If the
        requests around it failed while it was validated, it fails too.
        """
        if seq_id < self._next:
            self._fail(seq_id, f"a request before seq_id {seq_id} of {self._model_id} is missing")
            return
        self._ready[seq_id] = start
        self._advance()

    def skip(self, seq_id: int) -> None:
        """Let later requests start without a request that was rejected."""
        if seq_id >= self._next:
            self._ready[seq_id] = None
            self._advance()

    def fail_stalled(self, seconds: float) -> None:
        """Fail the ready requests if the next one has been missing for `seconds`.

        A request that has arrived and is still being validated is not missing.
        """
        arrived = self._futures.get(self._request_id(self._next)) is not None
        since = self._blocked_since
        if since is None or arrived or time.monotonic() - since < seconds:
            return
        reason = f"seq_id {self._next} of {self._model_id} has not come within {seconds:g} seconds"
        for seq_id in self._ready:
            self._fail(seq_id, reason)
        self._next = max(self._ready) + 1
        self._ready = {}
        self._blocked_since = None

    def _fail(self, seq_id: int, reason: str) -> None:
        future = self._futures.get(self._request_id(seq_id))
        if future is not None:
            message = f"{reason}, so the requests after it were not run: send the step again."
            future.settle(failed_result(message, RequestErrorCategory.User))

    def _advance(self) -> None:
        while self._held_by is None and self._next in self._ready:
            start = self._ready.pop(self._next)
            self._next += 1
            self._blocked_since = None
            held_by = None if start is None else start()
            if held_by is not None:
                self._hold_until_done(held_by)
        if self._ready and self._held_by is None and self._blocked_since is None:
            self._blocked_since = time.monotonic()

    def _hold_until_done(self, future: Future[Any]) -> None:
        loop = asyncio.get_running_loop()
        self._held_by = future

        def release() -> None:
            self._held_by = None
            self._advance()

        def on_done(_: Future[Any]) -> None:
            # RuntimeError: the loop is closed, as the server has stopped.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(release)

        future.add_done_callback(on_done)

    def _request_id(self, seq_id: int) -> str:
        return f"{self._model_id}:{seq_id}"
