"""Runs the passes of uploaded losses in the order of their requests, a slow one beside others.

A pass runs in a thread, which waits for the engine and for the process of the loss. The engine's
own thread, where the passes of all models run, does not wait for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from steelyard.engine.server.uploaded_loss.loss_process import MAX_PROCESSES

T = TypeVar("T")
Pass = Callable[[Callable[[], object]], T]  # called with a function that lets the next one begin


class LossQueue:
    """Runs one pass at a time, and one of each client; others begin beside one that is slow.

    A client whose loss is slow therefore delays the losses of others by a second. At most
    `MAX_PROCESSES` passes run at once: if as many clients have slow losses, the next one waits.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, "steelyard-loss")
        self._lock = threading.Lock()  # of the passes that wait
        self._waiting: dict[Hashable, deque[tuple[Future[Any], Pass[Any]]]] = {}
        self._turn = threading.Semaphore()

    def submit(self, client: Hashable, run: Pass[T]) -> Future[T]:
        """Queue a pass of a client.

        Args:
            client: whose passes run one after the other.
            run: the pass; it calls its argument once it has become slow.
        """
        future: Future[T] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(client, deque())
            waiting.append((future, run))
            if len(waiting) == 1:
                self._threads.submit(self._run_next, client)
        return future

    def close(self) -> None:
        """Wait for the passes that run, and cancel the others."""
        with self._lock:
            queued = [future for waiting in self._waiting.values() for future, _ in waiting]
        for future in queued:
            future.cancel()  # one that runs cannot be cancelled
        self._threads.shutdown(wait=True)

    def _run_next(self, client: Hashable) -> None:
        """Run the first pass of a client, and queue its next one behind those of other clients."""
        with self._lock:
            future, run = self._waiting[client][0]
        turn = _Turn(self._turn)
        try:
            if future.set_running_or_notify_cancel():
                _settle(future, run, turn)
        finally:
            turn.end()
        # The traceback of an error refers to this frame: the cycle would keep the model's graph.
        del future, run
        with self._lock:
            waiting = self._waiting[client]
            waiting.popleft()
            if waiting:
                self._threads.submit(self._run_next, client)
            else:
                del self._waiting[client]


def _settle(future: Future[Any], run: Pass[Any], turn: _Turn) -> None:
    try:
        result = run(turn.end)
    except BaseException as error:  # noqa: BLE001 - belongs to the client
        future.set_exception(error)
        del future, run  # as in `_run_next`
    else:
        turn.end()  # first: whoever waits for the result may ask for the next
        future.set_result(result)


class _Turn:
    """The turn of one pass, until it ends or lets the next one begin."""

    def __init__(self, turn: threading.Semaphore) -> None:
        self._turn, self._has_it = turn, True
        turn.acquire()

    def end(self) -> None:
        if self._has_it:
            self._has_it = False
            self._turn.release()
