"""A loaded base model and the one thread that works on it, call by call, in order."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from steelyard.engine.adapter import Adapter
from steelyard.engine.memory import TokenBudget
from steelyard.engine.model import Model
from steelyard.errors import ClosedError

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """Runs calls in the order they were made, for all clients of one base model.

    A call's `result` must not be waited for inside another one: there is one thread.
    """

    def __init__(self, model: Model, max_tokens: int | None) -> None:
        self.model = model
        self.room = TokenBudget(model, max_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="steelyard-engine")
        self._closed = False
        self._dropped: deque[Adapter] = deque()

    def give_back(self, adapter: Adapter, after: object) -> None:
        """Give the memory of an adapter back when `after` is gone, before the next call."""
        # Only noted: the garbage collector may come while the executor holds its locks.
        weakref.finalize(after, self._dropped.append, adapter).atexit = False

    def later(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """What `fn` gives, when its turn has come.

        Raises:
            ClosedError: the service is closed.
        """
        if self._closed:
            raise ClosedError("the service must be open, got a closed one: make a new one.")

        def work() -> T:
            while self._dropped:
                self.model.remove(self._dropped.popleft())
            return fn(*args, **kwargs)

        return self._thread.submit(work)

    def submit(
        self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> AwaitableConcurrentFuture[T]:
        """As `later`, for callers who may want to await it."""
        return AwaitableConcurrentFuture(self.later(fn, *args, **kwargs))

    def close(self) -> None:
        """Finish what was begun, refuse the rest."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)


def done(value: Any) -> AwaitableConcurrentFuture[Any]:
    """A future that has `value` already."""
    future: Future[Any] = Future()
    future.set_result(value)
    return AwaitableConcurrentFuture(future)
