"""A ticket: one piece of work, where it stands, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from steelyard.errors import TermTimeoutError
from steelyard.spec import title


class Cancelled(Exception):  # noqa: N818 - not an error: nobody waits for the result any more
    """The work was called off before it ended."""


class Ticket:
    """`fn(*args)` on behalf of a term, to be run in a lane and within a time limit.

    It is settled once, by whoever comes first: the worker with a result or an error, the
    waiting caller with a timeout, or a cancellation. Work that cannot be stopped may go on
    `running` after that.
    """

    def __init__(
        self,
        term: str,
        lane: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float | None = None,
        *,
        reply_bytes: int = 0,
    ) -> None:
        self.term = term
        self.lane = lane
        self.fn = fn
        self.args = args
        self.timeout = timeout
        self.reply_bytes = reply_bytes
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
    def running(self) -> bool:
        """Whether the work has begun and not ended, whatever was decided about its result."""
        return self.started is not None and self.ended is None

    @property
    def error(self) -> BaseException | None:
        """The error a settled ticket ended with, if it did."""
        return self._error

    def start(self) -> bool:
        """Note that the work begins. False if it was called off before."""
        with self._lock:
            if self.settled:
                return False
            self.started = monotonic()
        self.on_change(self)
        return True

    def run(self) -> None:
        """Do the work here and now, and settle with what comes of it."""
        if not self.start():
            return
        value, failure = None, None
        try:
            value = self.fn(*self.args)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the caller
            failure = error
        self.ended = monotonic()
        # Late is late, also when nobody was looking at the clock.
        if self.timeout is not None and self.ended - self.started > self.timeout:  # type: ignore[operator]  # it has started
            self.expire()
        self.settle(value, failure)

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Note that the work ended, and settle unless somebody has done so."""
        self.ended = monotonic()
        self.settle(value, error)

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Decide the result, once."""
        with self._lock:
            if self.settled:
                return
            self.settled = True
            self._value, self._error = value, error
            self.fn, self.args = _nothing, ()
        self.on_change(self)

    def overrun(self) -> None:
        """Note that the work was ended because it took too long."""
        self.ended = monotonic()
        self.expire()

    def expire(self) -> None:
        """Decide that it took too long, though it may still be running."""
        self.settle(
            error=TermTimeoutError(
                f"{title(self.term)} must end within {self.timeout:g} s and did not: "
                f"raise its timeout, make it faster, or drop it for such steps with "
                f"on_error='skip'.",
                term=self.term,
            )
        )

    def cancel(self) -> None:
        """Call it off, and stop the work where that is possible."""
        if not self.settled:
            self.settle(error=Cancelled())
            self.stop()

    def result(self) -> Any:
        """What came of a settled ticket: the value, or the error raised."""
        if self._error is not None:
            raise self._error
        return self._value


def _nothing() -> None:
    """What a settled ticket would run: it lets go of the term and its data."""
