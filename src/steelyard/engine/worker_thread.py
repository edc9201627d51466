"""One thread for each loaded base model, which runs the calls of all clients in order.

The clients' methods have the SDK's async forms beside them: `at_once`, `in_thread` and `async_form`
derive those from the methods themselves.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from steelyard.engine.adapter import Adapter
from steelyard.engine.memory import TokenBudget
from steelyard.engine.model import Model
from steelyard.errors import ClosedError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F")
Client = TypeVar("Client")
Method = Callable[Concatenate[Client, P], T]
AsyncMethod = Callable[Concatenate[Client, P], Coroutine[Any, Any, T]]


@dataclass(eq=False)
class _QueuedCall:
    """A call in the queue; one with a batch key holds a request that a running batch may take."""

    run: Callable[..., Any]
    batch_key: Hashable = None
    request: Any = None
    future: Future[Any] = field(default_factory=Future)

    def begin(self) -> bool:
        """False if the call was cancelled while it was queued."""
        return self.future.set_running_or_notify_cancel()


class Arrivals(Generic[R, T]):
    """Requests for the batch that runs now; used on the worker thread alone.

    Requests wait in the queue of all calls and keep their place in it: the first `take` returns
    all of the batch's kind before the next call of another kind, and later ones those at the head
    of the queue. A batch therefore never overtakes a call of training, and one whose requests
    keep coming ends when requests for other weights wait.
    """

    def __init__(self, queue: deque[_QueuedCall], lock: threading.Lock, first: _QueuedCall) -> None:
        self._queue = queue
        self._lock = lock
        self._first: _QueuedCall | None = first
        self._key = first.batch_key
        self.taken: list[Future[T]] = []

    def take(self) -> list[tuple[R, Future[T]]]:
        """Requests that have arrived, each with the future of its result."""
        with self._lock:
            if self._first is not None:
                calls, self._first = [self._first, *self._waiting()], None
            else:
                calls = []
                while self._queue and self._queue[0].batch_key == self._key:
                    calls.append(self._queue.popleft())
        begun = [call for call in calls if call.begin()]
        if begun:
            # Only those without a result: a batch may go on for days.
            unfinished = [future for future in self.taken if not future.done()]
            self.taken = unfinished + [call.future for call in begun]
        return [(call.request, call.future) for call in begun]

    def _waiting(self) -> list[_QueuedCall]:
        waiting = []
        for call in list(self._queue):
            if call.batch_key is None:
                break
            if call.batch_key == self._key:
                self._queue.remove(call)
                waiting.append(call)
        return waiting


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
        self._queue: deque[_QueuedCall] = deque()
        self._lock = threading.Lock()  # of the queue, and of closing
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
        return AwaitableConcurrentFuture(self._append(_QueuedCall(partial(fn, *args, **kwargs))))

    def submit_request(
        self, run_batch: Callable[[Arrivals[R, T]], None], key: Hashable, request: R
    ) -> Future[T]:
        """Queue a request; a batch of the same key that runs when its turn comes takes it.

        Args:
            run_batch: runs a batch if none does. It gives each request that it takes a result; if
                it raises, all without one have its error.
            key: names the kind of request; not None.
            request: the request.

        Raises:
            ClosedError: the service is closed.
        """
        return self._append(_QueuedCall(run_batch, key, request))

    def close(self) -> None:
        """Finish the running call, cancel the queued ones, and refuse new ones."""
        with self._lock:
            self._closed = True
            queued = list(self._queue)
            self._queue.clear()
        for call in queued:
            call.future.cancel()
        self._thread.shutdown(wait=True)

    def _append(self, call: _QueuedCall) -> Future[Any]:
        with self._lock:
            if self._closed:
                raise ClosedError("the service must be open, got a closed one: make a new one.")
            self._queue.append(call)
            self._thread.submit(self._run_next)
        return call.future

    def _run_next(self) -> None:
        with self._lock:
            call = self._queue.popleft() if self._queue else None
        if call is None:  # taken by a batch, or cancelled
            return
        if call.batch_key is not None:
            self._run_batch(call)
        elif call.begin():
            try:
                self._remove_unused()
                result = call.run()
            except BaseException as error:  # noqa: BLE001 - belongs to the caller
                call.future.set_exception(error)
                # The error's traceback refers to this frame: the cycle would keep the arguments.
                del call
            else:
                call.future.set_result(result)

    def _run_batch(self, call: _QueuedCall) -> None:
        arrivals: Arrivals[Any, Any] = Arrivals(self._queue, self._lock, call)
        try:
            self._remove_unused()
            call.run(arrivals)
        except BaseException as error:  # noqa: BLE001 - belongs to the callers
            # The frames of the batch hold the cache of all its samples, and the error holds them.
            traceback.clear_frames(error.__traceback__)
            # The first request has no result either if the batch failed before it took any.
            for future in [*arrivals.taken, call.future]:
                if not future.done():
                    future.set_exception(error)

    def _remove_unused(self) -> None:
        while self._unused:
            self.model.remove_adapter(self._unused.popleft())


def completed(value: T) -> AwaitableConcurrentFuture[T]:
    """Future that has its result already."""
    future: Future[T] = Future()
    future.set_result(value)
    return AwaitableConcurrentFuture(future)


def at_once(method: Method[Client, P, T]) -> AsyncMethod[Client, P, T]:
    """Async form of a method that does not block, such as one that queues a call: calls it."""

    async def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _bound(client, method)(*args, **kwargs)

    return _described_as(method, call)


def in_thread(method: Method[Client, P, T]) -> AsyncMethod[Client, P, T]:
    """Async form of a method that blocks: runs it in a thread, while the event loop goes on."""

    async def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(_bound(client, method), *args, **kwargs)

    return _described_as(method, call)


def async_form(method: Method[Client, P, Future[T]]) -> AsyncMethod[Client, P, T]:
    """Async form of a method that returns a future: awaits its result."""

    async def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(_bound(client, method)(*args, **kwargs))

    return _described_as(method, call)


def _bound(client: Client, method: Method[Client, P, T]) -> Callable[P, T]:
    # By its name, so that a subclass that overrides a method changes its async form too.
    bound: Callable[P, T] = getattr(client, method.__name__)
    return bound


def _described_as(method: Callable[..., object], call: F) -> F:
    # Not `functools.wraps`: tools that unwrap `call` would take it for a blocking function.
    described: Any = call
    described.__module__ = method.__module__
    described.__name__ = f"{method.__name__}_async"
    described.__qualname__ = f"{method.__qualname__}_async"
    described.__signature__ = inspect.signature(method)
    described.__doc__ = f"Run `{method.__name__}` without blocking the event loop."
    return call
