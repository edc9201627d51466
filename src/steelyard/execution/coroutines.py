"""`CoroutineExecutor`: runs async terms on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading

from steelyard.execution.batch import Ticket
from steelyard.execution.executor import Executor

# Seconds after its deadline within which a cancelled coroutine must end.
CANCEL_GRACE = 0.5


class CoroutineExecutor(Executor):
    """An event loop in a thread of its own, on which all async terms run.

    It is never the caller's loop: `compute` works inside a running loop, `acompute` does not
    block it, and connections that a term keeps open from call to call stay on one loop.
    """

    awaits = True
    limited = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: _LoopThread | None = None

    def submit(self, ticket: Ticket) -> None:
        """Start the coroutine `ticket.fn(*ticket.args)`."""
        with self._lock:
            if self._loop is None:
                self._loop = _LoopThread()
            self._loop.begin(ticket)

    def deadline(self, ticket: Ticket) -> float | None:
        """Time after the loop's own timeout at which a coroutine counts as stuck."""
        waiting_since = ticket.submitted if ticket.turn is None else ticket.turn.since
        since = waiting_since if ticket.started is None else ticket.started
        return None if since is None else since + (ticket.timeout or 0.0) + CANCEL_GRACE

    def abandon(self) -> None:
        """Replace the loop if a coroutine blocks it."""
        with self._lock:
            loop = self._loop
            if loop is not None and not loop.answers():
                loop.stop()
                self._loop = None

    def close(self) -> None:
        """Cancel running tasks and end the loop."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
            loop.join(timeout=1.0)


class _LoopThread(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="steelyard-loop", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.start()

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def begin(self, ticket: Ticket) -> None:
        self._loop.call_soon_threadsafe(self._begin, ticket)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def answers(self, within: float = 0.1) -> bool:
        """Whether the loop responds."""
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(within)

    def _begin(self, ticket: Ticket) -> None:
        task = self._loop.create_task(self._run(ticket))
        ticket.stop = lambda: self._loop.call_soon_threadsafe(task.cancel)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, ticket: Ticket) -> None:
        if ticket.turn is None:
            await self._run_now(ticket)
            return
        try:
            await ticket.turn.take_async()
            with ticket.turn.inside():
                await self._run_now(ticket)
        finally:
            ticket.turn.end()

    async def _run_now(self, ticket: Ticket) -> None:
        if not ticket.start():
            return
        try:
            async with asyncio.timeout(ticket.timeout) as limit:
                value = await ticket.fn(*ticket.args)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            if limit.expired():
                ticket.overrun()
            else:
                ticket.end(error=error)
        else:
            ticket.end(value)
