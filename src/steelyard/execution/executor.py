"""`Executor`, which runs terms; `Ticket`, one unit of work; `Batch`, those of one call."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Self

from steelyard.errors import TermTimeoutError
from steelyard.execution.random_state import Turn
from steelyard.spec.error_messages import title


class Executor(ABC):
    """Runs offloaded terms.

    It starts, ends and settles each ticket; a failure or a timeout affects that ticket alone.

    Attributes:
        awaits: whether the functions of its tickets return coroutines.
        limited: whether `max_concurrency` limits how many tickets run at once.
    """

    awaits = False
    limited = True

    @abstractmethod
    def submit(self, ticket: Ticket) -> None:
        """Start the ticket without waiting for it; errors of its work settle the ticket."""

    @abstractmethod
    def close(self) -> None:
        """Stop running work as far as possible, and accept no more."""

    def deadline(self, ticket: Ticket) -> float | None:  # noqa: ARG002 - for subclasses
        """Time at which the waiting caller gives up; None if the executor enforces timeouts."""
        return None

    def prepare(self, term: str, call: object) -> None:  # noqa: B027 - optional in subclasses
        """Check that calls of a term can run here, and warm up; called before the first call.

        Raises:
            TermError: they cannot.
        """

    def abandon(self) -> None:  # noqa: B027 - optional in subclasses
        """Replace the resources held by a ticket that has timed out and still runs."""


# Seconds of one wait for an event. CPython does not wake a wait that begins just after a signal was
# caught: a Ctrl-C at that moment has to wait for the next bytecode.
_LONGEST_WAIT = 1.0
_NO_RESOURCES: Mapping[str, Any] = {}


class Cancelled(Exception):  # noqa: N818 - not an error: the result is no longer wanted
    """The work was cancelled before it ended."""


class Ticket:
    """`fn(*args)` on behalf of a term, to be run by one executor within a time limit.

    It is settled exactly once: by the worker with a result or an error, by the waiting caller
    with a timeout, or by a cancellation. Work that cannot be stopped may still be `running`
    after that.

    Args:
        term: the name of the term.
        executor: the name of the executor, among those of the batch.
        fn: called with `args`.
        args: the arguments.
        timeout: seconds from its start; None: no limit.
        reply_bytes: the size of its result, roughly.
        kind: the word for the term in messages.
        shared: objects inside of `fn` and `args` that other tickets of the batch have too, such
            as the data; an executor on other machines sends them once, and keeps what it sent in
            `sent`, by their ids.
        resources: of its task on Ray.
        turn: taken before the work starts in this process, and ended when the ticket is settled;
            None: it runs beside any other work.
        may_skip: whether the term could be skipped when it fails, and its spec does not say so.
    """

    def __init__(
        self,
        term: str,
        executor: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float | None = None,
        *,
        reply_bytes: int = 0,
        kind: str = "regularizer",
        shared: Sequence[object] = (),
        resources: Mapping[str, Any] = _NO_RESOURCES,
        turn: Turn | None = None,
        may_skip: bool = False,
    ) -> None:
        self.term = term
        self.kind = kind
        self.executor = executor
        self.fn = fn
        self.args = args
        self.timeout = timeout
        self.reply_bytes = reply_bytes
        self.shared = shared
        self.resources = resources
        self.turn = turn
        self.may_skip = may_skip
        self.sent: dict[int, Any] = {}
        self.submitted: float | None = None
        self.started: float | None = None
        self.ended: float | None = None
        self.settled = False
        self.on_change: Callable[[Ticket], object] = lambda _: None
        self.stop: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def title(self) -> str:
        """Name of the term in messages."""
        return title(self.term, self.kind)

    @property
    def or_skip(self) -> str:
        """The setting that goes on without the term, to end a message; empty if it is of no use."""
        return ", or set on_error='skip' to go on without it" if self.may_skip else ""

    @property
    def running(self) -> bool:
        """Whether the work has started and not ended, also if the ticket is settled already."""
        return self.started is not None and self.ended is None

    @property
    def error(self) -> BaseException | None:
        """The error with which the ticket was settled, if any."""
        return self._error

    def start(self) -> bool:
        """Record that the work starts. False if it was cancelled before."""
        with self._lock:
            if self.settled:
                return False
            self.started = monotonic()
        self.on_change(self)
        return True

    def run(self) -> None:
        """Run the work in this thread, when it is its turn; settle with its result or error."""
        if self.turn is not None:
            self.turn.take()
        if not self.start():
            return
        value, failure = None, None
        try:
            with nullcontext() if self.turn is None else self.turn.inside():
                value = self.fn(*self.args)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            failure = error
        self.ended = monotonic()
        # The timeout holds also if the waiting caller has not noticed it yet.
        if self.timeout is not None and self.ended - self.started > self.timeout:  # type: ignore[operator]  # it has started
            self.expire()
        self.settle(value, failure)

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Record that the work ended, and settle the ticket unless it is settled."""
        self.ended = monotonic()
        self.settle(value, error)

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the result or the error; only the first call has an effect."""
        with self._lock:
            if self.settled:
                return
            self.settled = True
            self._value, self._error = value, error
            self.fn, self.args, self.shared, self.sent = _nothing, (), (), {}
        if self.turn is not None:
            self.turn.end()
        self.on_change(self)

    def overrun(self) -> None:
        """Record that the executor ended the work because it took too long."""
        self.ended = monotonic()
        self.expire()

    def expire(self) -> None:
        """Settle with a timeout error, though the work may still be running."""
        self.settle(
            error=TermTimeoutError(
                f"{self.title} must end within {self.timeout:g} s and did not: "
                f"raise its timeout or make it faster{self.or_skip}.",
                term=self.term,
            )
        )

    def cancel(self) -> None:
        """Cancel the ticket, and stop the work if that is possible."""
        if not self.settled:
            self.settle(error=Cancelled())
            self.stop()

    def result(self) -> Any:
        """Return the value of a settled ticket, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._value


def _nothing() -> None:
    """Replaces `fn` of a settled ticket, so that the term and its data can be freed."""


class Batch:
    """Starts tickets as the concurrency limits allow, and yields them as they are settled.

    Use it as a context manager: tickets that are left when the block ends are cancelled.

    Args:
        tickets: the work, started in this order.
        executors: by the names that the tickets give.
        width: how many tickets may run at once in an executor, if it is limited.
        widths: how many, for executors with a number of their own.
        in_turn: run all tickets one after the other.
        on_start: called in the waiting thread for each ticket that has started.
        events: the queue that the waiting thread reads; another thread cancels the batch by
            putting None in it.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        executors: Mapping[str, Executor],
        width: int,
        *,
        widths: Mapping[str, int] | None = None,
        in_turn: bool = False,
        on_start: Callable[[Ticket], object] | None = None,
        events: SimpleQueue[Ticket | None] | None = None,
    ) -> None:
        self._tickets = tickets
        self._executors = executors
        self._on_start = on_start
        self._events = SimpleQueue() if events is None else events
        self._lock = threading.Lock()
        self._queues: dict[str, deque[Ticket]] = {}
        self._free: dict[str, int] = {}
        self._freed: set[Ticket] = set()
        self._sent: dict[int, Any] = {}
        self._queue_of = (lambda _: "") if in_turn else (lambda ticket: ticket.executor)
        for ticket in tickets:
            ticket.on_change = self._changed
            ticket.sent = self._sent
            name = self._queue_of(ticket)
            self._queues.setdefault(name, deque()).append(ticket)
            default = width if executors[ticket.executor].limited else len(tickets)
            self._free[name] = 1 if in_turn else (widths or {}).get(name, default)

    def __enter__(self) -> Self:
        try:
            for name in self._queues:
                self._admit(name)
        except BaseException:  # Ctrl-C: the block is not entered, and so not left either
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._queues.clear()
        for ticket in self._tickets:
            ticket.cancel()
        self._sent.clear()

    def settled(self) -> Iterator[Ticket]:
        """Yield each ticket once, in the order in which they are settled.

        Raises:
            Cancelled: another thread put None in `events`.
        """
        waiting = set(self._tickets)
        begun: set[Ticket] = set()
        while waiting:
            for ticket in self._next(waiting):
                if (
                    self._on_start is not None
                    and ticket.started is not None
                    and ticket not in begun
                ):
                    begun.add(ticket)
                    self._on_start(ticket)
                if ticket.settled and ticket in waiting:
                    waiting.remove(ticket)
                    yield ticket

    def _next(self, waiting: set[Ticket]) -> list[Ticket]:
        """Wait for a change; the changed ticket, or those that have passed their deadline."""
        seconds = _LONGEST_WAIT
        if self._events.empty():  # else there is no need to read the deadlines of all tickets
            deadlines = [d for t in waiting if (d := self._deadline(t)) is not None]
            seconds = min([seconds, *(max(0.0, deadline - monotonic()) for deadline in deadlines)])
        try:
            event = self._events.get(timeout=seconds)
        except Empty:
            now = monotonic()
            overdue = [t for t in waiting if (d := self._deadline(t)) is not None and d <= now]
            for ticket in overdue:
                ticket.expire()
                ticket.stop()
            return overdue
        if event is None:
            raise Cancelled
        return [event]

    def _deadline(self, ticket: Ticket) -> float | None:
        if ticket.timeout is None or ticket.settled:
            return None
        return self._executors[ticket.executor].deadline(ticket)

    def _changed(self, ticket: Ticket) -> None:
        self._events.put(ticket)
        if ticket.settled:
            name = self._queue_of(ticket)
            with self._lock:
                if ticket in self._freed or ticket.submitted is None:
                    return
                self._freed.add(ticket)
                self._free[name] += 1
            self._admit(name)

    def _admit(self, name: str) -> None:
        while True:
            with self._lock:
                queue = self._queues.get(name)
                if not queue or not self._free[name]:
                    return
                ticket = queue.popleft()
                self._free[name] -= 1
                ticket.submitted = monotonic()
            try:
                self._executors[ticket.executor].submit(ticket)
            except Exception as error:  # noqa: BLE001 - raised where the ticket is waited for
                ticket.settle(error=error)
