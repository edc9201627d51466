"""One thread for each loaded base model, which runs the calls of all clients in order."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from steelyard.engine.adapter import Adapter
from steelyard.engine.memory import TokenBudget
from steelyard.engine.model import Model
from steelyard.errors import ClosedError

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """Runs calls in the order in which they were submitted, for all clients of one base model.

    The model, its adapters and the token budget belong to this thread, so that none of them needs a
    lock. A call must not wait for the result of another call: there is one thread, and it would
    wait for itself.

    Args:
        model: the loaded base model.
        max_tokens: most tokens of one autograd graph; None: estimated from the free memory.
    """

    def __init__(self, model: Model, max_tokens: int | None) -> None:
        self.model = model
        self.token_budget = TokenBudget(model, max_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steelyard-engine")
        self._closed = False
        self._unused: deque[Adapter] = deque()

    def remove_with(self, owner: object, adapter: Adapter) -> None:
        """Remove an adapter from the model before the next call after `owner` was collected."""
        # The finalizer only appends to a deque, which takes no lock: the garbage collector may run
        # it in any thread, even inside `submit` while the executor holds its lock.
        weakref.finalize(owner, self._unused.append, adapter).atexit = False

    def submit(
        self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> AwaitableConcurrentFuture[T]:
        """Queue `fn(*args, **kwargs)`; the future can be waited for or awaited.

        Raises:
            ClosedError: the service is closed.
        """
        if self._closed:
            raise ClosedError("the service must be open, got a closed one: make a new one.")

        def work() -> T:
            while self._unused:
                self.model.remove_adapter(self._unused.popleft())
            return fn(*args, **kwargs)

        return AwaitableConcurrentFuture(self._thread.submit(work))

    def close(self) -> None:
        """Finish the running call, cancel the queued ones, and refuse new ones."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)


def completed(value: T) -> AwaitableConcurrentFuture[T]:
    """Future that has its result already."""
    future: Future[T] = Future()
    future.set_result(value)
    return AwaitableConcurrentFuture(future)
