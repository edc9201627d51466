"""Turns: work that changes the global random generators runs one at a time in a process.

All threads share these generators. A call of a term that draws from them is given states of its
own, so while it runs no other such call may. Inside of it a pipeline may be computed, whose terms
take turns among themselves: the turns of a process form a tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from time import monotonic

# Seconds of one wait: CPython does not wake a wait that begins just after a signal was caught.
_LONGEST_WAIT = 1.0


class _Queue:
    """Turns that are held, and those that wait for them, in order."""

    def __init__(self, holder: Turn | None = None) -> None:
        self.holder = holder  # of the turn inside of which these are taken
        self.lock = threading.Lock()
        self.held: set[Turn] = set()
        self.waiting: deque[Turn] = deque()

    def grant(self) -> None:
        """Grant the turns that are next; called with the lock."""
        while self.waiting:
            group = self.waiting[0].group
            if self.held and (group is None or any(turn.group is not group for turn in self.held)):
                return
            turn = self.waiting.popleft()
            self.held.add(turn)
            turn.since = monotonic()
            turn.granted.set_result(None)


_of_process = _Queue()
_queue: ContextVar[_Queue] = ContextVar("_queue", default=_of_process)


class Turn:
    """The right to change the global random generators, for as long as it is held.

    Args:
        group: turns of the same group, such as the coroutines of an event loop, are held together,
            since they never run at the same moment; None: it is held alone.

    Attributes:
        group: as given.
        granted: done once the turn is held, or ended before that.
        since: the time from which it is held; None before.
    """

    def __init__(self, group: object = None) -> None:
        self.group = group
        self.granted: Future[None] = Future()
        # As a running future it cannot be cancelled by those who wait for it.
        self.granted.set_running_or_notify_cancel()
        self.since: float | None = None
        self._queue = _queue.get()
        self._inner = _Queue(self)
        self._undo: Callable[[], object] | None = None
        self._ended = False

    def take(self) -> None:
        """Wait until it is held, or was ended by another thread."""
        self._request()
        while not self.granted.done():
            with contextlib.suppress(TimeoutError):
                self.granted.result(_LONGEST_WAIT)

    async def take_async(self) -> None:
        """As `take`, awaited."""
        self._request()
        await asyncio.wrap_future(self.granted)

    def end(self) -> None:
        """Undo the change that is in force, and let the next ones have their turn."""
        queue = self._queue
        with queue.lock:
            if self._ended:
                return
            self._ended = True
            if self._undo is not None:
                self._undo()
                self._undo = None
            if self in queue.held:
                queue.held.remove(self)
            else:
                if self in queue.waiting:
                    queue.waiting.remove(self)
                self.granted.set_result(None)
            queue.grant()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let the block, and what it starts, take turns inside of this one; end it afterwards."""
        entered = _queue.set(self._inner)
        try:
            yield
        finally:
            _queue.reset(entered)
            self.end()

    def change(self, undo: Callable[[], object]) -> bool:
        """Record how to undo a change, in case the turn ends before the work does.

        False if it has ended: nothing may be changed then.
        """
        with self._queue.lock:
            if not self._ended:
                self._undo = undo
            return not self._ended

    def undo(self) -> bool:
        """Undo the change; False if the turn has ended, and that did it."""
        with self._queue.lock:
            undo, self._undo = self._undo, None
            if undo is not None:
                undo()
            return undo is not None

    def _request(self) -> None:
        queue = self._queue
        with queue.lock:
            if not self._ended:
                queue.waiting.append(self)
                queue.grant()


@contextlib.contextmanager
def taken_turn() -> Iterator[Turn]:
    """Take a turn in this thread; it ends with the block."""
    turn = Turn()
    try:
        turn.take()
        yield turn
    finally:
        turn.end()


def current_turn() -> Turn | None:
    """The turn inside of which the caller runs."""
    return _queue.get().holder


if hasattr(os, "register_at_fork"):  # the threads that hold turns are the parent's
    os.register_at_fork(after_in_child=_of_process.__init__)  # type: ignore[misc]  # as it was made
