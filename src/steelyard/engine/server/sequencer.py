"""Queue of one model's requests, which starts them in the order of their `seq_id`.

The SDK numbers the requests of a model from 1. It sends the chunks of one batch concurrently, the
first chunk last, and sends again every request that got no response. Requests therefore arrive
out of order, and more than once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from starlette.exceptions import HTTPException
from tinker.types import RequestErrorCategory

from steelyard.engine.server.futures import ServerFuture, ServerFutures, failed_result
from steelyard.engine.server.http_errors import BAD_REQUEST, FORBIDDEN

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
