"""`ThreadExecutor`: runs tickets in threads."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from queue import SimpleQueue

from steelyard.execution.batch import Ticket
from steelyard.execution.executor import Executor


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
