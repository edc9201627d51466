"""Executors inside this process: threads, and an event loop for async terms."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from queue import SimpleQueue

from steelyard.execution.executor import Executor, Ticket


class ThreadExecutor(Executor):
    """Daemon threads, started when needed and reused.

    `concurrent.futures` would join a stuck thread at the exit of the interpreter, and would
    not replace it; here a stuck thread is simply not reused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._keep = max(2, os.cpu_count() or 1)
        self._closed = False

    def submit(self, ticket: Ticket) -> None:
        """Run the ticket in an idle thread, or in a new one."""
        context = contextvars.copy_context()
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
            worker.start()
        worker.inbox.put((context, ticket))

    def close(self) -> None:
        """End idle threads now, and busy ones when they are done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.inbox.put(None)
            worker.join()

    def deadline(self, ticket: Ticket) -> float | None:
        """Time at which the waiting caller gives up, since a thread cannot be stopped."""
        return None if ticket.started is None else ticket.started + (ticket.timeout or 0.0)

    def take_back(self, worker: _Worker) -> bool:
        """Keep an idle worker for reuse, unless there are enough. Returns whether it is kept."""
        with self._lock:
            keep = not self._closed and len(self._idle) < self._keep
            if keep:
                self._idle.append(worker)
        return keep


class _Worker(threading.Thread):
    def __init__(self, executor: ThreadExecutor) -> None:
        super().__init__(name="steelyard-term", daemon=True)
        self.inbox: SimpleQueue[tuple[contextvars.Context, Ticket] | None] = SimpleQueue()
        self._executor = executor
        self._has_cuda_context = False

    def run(self) -> None:
        while (job := self.inbox.get()) is not None:
            context, ticket = job
            if not self._has_cuda_context:
                self._has_cuda_context = _enter_cuda_context()
            context.run(ticket.run)
            del job, context, ticket
            if not self._executor.take_back(self):
                return


def _enter_cuda_context() -> bool:
    """Enter torch's CUDA context if there is one: cuBLAS warns in a thread that is in none."""
    cuda = sys.modules.get("torch.cuda")  # perhaps half imported, by another thread
    is_initialized = getattr(cuda, "is_initialized", None)
    if cuda is None or is_initialized is None or not is_initialized():
        return False
    cuda.set_device(cuda.current_device())  # pragma: no cover  # by `make test-gpu`
    return True  # pragma: no cover


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
