"""`ProcessExecutor`: runs tickets in worker processes, which are killed on a timeout."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import weakref
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from steelyard.errors import ClosedError, UnpicklableError, WorkerDiedError
from steelyard.execution import worker_process
from steelyard.execution.executor import Cancelled, Executor, Ticket
from steelyard.execution.process_lifecycle import kill_group, lost_workers, worker_context
from steelyard.execution.transport import Message, Parcel
from steelyard.spec.error_messages import describe
from steelyard.spec.error_messages import title as term_title

# Seconds between two looks at a pool, which breaks without a sign to those who wait for it.
_WATCH_INTERVAL = 0.5
_CLOSED = "the workers were closed while a term ran on them."
_STARTS = 3  # attempts to start a pool
_CURES = {
    "process": "leave out what cannot be pickled, or use run_in='thread'",
    "ray": "leave out what cannot be pickled; a module that the nodes do not have goes with "
    "runtime_env={'py_modules': [...]} or {'working_dir': '.'} in its resources",
}


@dataclass(eq=False)
class _Sent:
    """A call on its way: the pool it was sent to, and whether that was the second time."""

    ticket: Ticket
    parcel: Parcel
    pool: ProcessPool | None = None
    again: bool = False


class ProcessExecutor(Executor):
    """A pool of worker processes with torch imported, one more than run at once.

    With the spare one, the call after a kill does not wait for the import of torch. A timeout
    or a crash ends exactly one worker.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._lock = threading.RLock()
        self._pool: ProcessPool | None = None
        self._end_pool: Finalize | None = None
        self._pool_ended = threading.Event()
        # A dict, whose `pop` is one step: of several threads with news of a call, one handles it.
        self._waiting: dict[_Sent, Ticket] = {}
        self._closed = False
        self._close_at_exit: Finalize | None = None

    def prepare(self, term: str, call: object) -> None:
        """Check that a call pickles, and start the workers, without waiting for them.

        Raises:
            UnpicklableError: the call does not pickle.
        """
        check_picklable(term, call)
        self.warm()

    def warm(self) -> None:
        """Start the workers, without waiting for them."""
        self._register_close()
        threading.Thread(target=self._warm, name="steelyard-warm", daemon=True).start()

    def _warm(self) -> None:
        with contextlib.suppress(ClosedError):  # the program may end before this thread runs
            self._running_pool()

    def submit(self, ticket: Ticket) -> None:
        """Send the ticket to a worker."""
        try:
            parcel = Parcel((ticket.fn, ticket.args), reply_bytes=ticket.reply_bytes)
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            ticket.end(error=unpicklable(ticket.term, error, title=ticket.title))
            return
        if ticket.start():
            self._send(ticket, parcel)
        else:
            parcel.remove()

    def close(self) -> None:
        """Kill the workers, end the pool's threads, and fail the tickets that still run."""
        with self._lock:
            self._closed = True
            self._pool, end, self._end_pool = None, self._end_pool, None
            self._pool_ended.set()
        if end is not None:
            end()
        # A stopped pool does not settle the futures of its tasks.
        for sent in list(self._waiting):
            self._finish(sent, error=ClosedError(_CLOSED))

    def _register_close(self) -> None:
        """Close this executor when the process ends, before its semaphores are removed.

        A child of multiprocessing runs no atexit functions, but these finalizers, and forgets those
        of its parent. Otherwise a pool could be started, or replaced by the watching thread, while
        the process ends, and its workers would not find the semaphores.
        """
        with self._lock:
            if self._close_at_exit is None or not self._close_at_exit.still_active():
                self._close_at_exit = Finalize(
                    self, _close_if_alive, (weakref.ref(self),), exitpriority=101
                )

    def _running_pool(self, broken: ProcessPool | None = None) -> ProcessPool:
        with self._lock:
            if self._closed:
                raise ClosedError(_CLOSED)
            self._register_close()
            if self._pool is not None and (self._pool is broken or not self._pool.active):
                # In a thread, since this may be one of the pool, which cannot join itself.
                retire = partial(self._retire, self._pool, self._end_pool)
                threading.Thread(target=retire, name="steelyard-retire", daemon=True).start()
                self._pool_ended.set()
                self._pool = None
            if self._pool is None:
                self._pool = self._start_pool()
                self._end_pool = Finalize(self, _end, (self._pool,), exitpriority=100)
                self._pool_ended = threading.Event()
                watch = partial(self._replace_if_broken, self._pool, self._pool_ended)
                threading.Thread(target=watch, name="steelyard-watch", daemon=True).start()
            return self._pool

    def _start_pool(self) -> ProcessPool:
        threads = max(1, (os.cpu_count() or 1) // self._processes)
        for attempt in range(_STARTS):
            pool = ProcessPool(
                max_workers=self._processes + 1,
                initializer=worker_process.prepare,
                initargs=(threads,),
                context=worker_context(preload=worker_process.__name__),
            )
            try:
                assert pool.active  # noqa: S101 - reading it starts the pool
            except BrokenProcessPool:  # the fork server died meanwhile
                _end(pool)
                if attempt + 1 == _STARTS:
                    raise
            else:
                break
        return pool

    def _replace_if_broken(self, pool: ProcessPool, ended: threading.Event) -> None:
        """Replace a pool that breaks while tickets wait for it and no call notices."""
        while not ended.wait(_WATCH_INTERVAL):
            if not pool.active:
                with self._lock:
                    if self._pool is pool:  # else it was closed, or replaced by a call
                        self._running_pool(broken=pool)
                return

    def _retire(self, pool: ProcessPool, end: Finalize | None) -> None:
        """End a broken pool, and send the tickets again whose futures it did not settle."""
        if end is not None:
            end()
        for sent in list(self._waiting):
            if sent.pool is pool:
                self._send_again(sent, BrokenProcessPool("its worker pool broke twice."))

    def _send(self, ticket: Ticket, parcel: Parcel, broken: ProcessPool | None = None) -> None:
        """Send a call to a worker, the second time if the pool broke that it was sent to."""
        sent = _Sent(ticket, parcel, again=broken is not None)
        self._waiting[sent] = ticket
        try:
            sent.pool = self._running_pool(broken)
            future = sent.pool.schedule(
                worker_process.work, args=(parcel.message, sys.path), timeout=ticket.timeout
            )
        except Exception as error:  # noqa: BLE001 - raised where the ticket is waited for
            if isinstance(error, BrokenProcessPool) and sent.pool is not None:
                self._send_again(sent, error)  # it broke since it was looked at
            else:
                self._finish(sent, error=error)
            return
        ticket.stop = future.cancel
        future.add_done_callback(partial(self._settle, sent))
        if ticket.settled:  # it was cancelled meanwhile
            future.cancel()  # type: ignore[no-untyped-call]  # untyped in pebble

    def _send_again(self, sent: _Sent, error: Exception) -> None:
        ticket = sent.ticket
        if sent.again or ticket.settled:
            self._finish(sent, error=error)
        elif self._waiting.pop(sent, None) is not None:  # else another thread has done so
            self._send(ticket, sent.parcel, broken=sent.pool)

    def _settle(self, sent: _Sent, future: Future[tuple[bool, Message]]) -> None:
        """Read the worker's reply, in the pool's thread."""
        ticket = sent.ticket
        try:
            value, error = _answer(ticket, sent.parcel, future)
        except TimeoutError:
            ticket.overrun()
            value = error = None
        except Exception as failure:  # noqa: BLE001 - raised where the ticket is waited for
            # The death of an idle worker or of the fork server is not a failure of this term.
            if isinstance(failure, BrokenProcessPool):
                self._send_again(sent, failure)
                return
            value, error = None, failure
        self._finish(sent, value, error)

    def _finish(self, sent: _Sent, value: Any = None, error: BaseException | None = None) -> None:
        ticket = self._waiting.pop(sent, None)
        if ticket is not None:  # else another thread has ended it, or sent it again
            ticket.end(value, error)
            sent.parcel.remove()


def _answer(
    ticket: Ticket, parcel: Parcel, future: Future[tuple[bool, Message]]
) -> tuple[Any, BaseException | None]:
    """The value or the error in the reply; errors of the pool itself are raised."""
    try:
        succeeded, message = future.result()
    except CancelledError:
        return None, Cancelled()
    except ProcessExpired as error:
        if error.pid in lost_workers:
            raise BrokenProcessPool("the fork server died") from error
        if error.pid:
            kill_group(error.pid)  # the processes that the term has started
        return None, _died(ticket, error)
    try:
        answer = parcel.open_reply(message)
    except Exception as error:  # noqa: BLE001 - unpickling runs user code
        return None, unpicklable(ticket.term, error, "its result", ticket.title)
    if succeeded:
        return answer, None
    if isinstance(answer, worker_process.TransportError):
        return None, unpicklable(ticket.term, answer.why, answer.what, ticket.title)
    return None, answer


def _close_if_alive(executor: weakref.ref[ProcessExecutor]) -> None:
    result = executor()
    if result is not None:  # else it was collected, and its pool was ended
        result.close()


def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]  # untyped in pebble
    pool.join()


def check_picklable(term: str, thing: object, place: str = "process") -> None:
    """Check that an object can be sent to a process, here or on a Ray cluster.

    Raises:
        UnpicklableError: it cannot.
    """
    try:
        pickle.loads(cloudpickle.dumps(thing))  # noqa: S301 - just made
    except Exception as error:
        raise unpicklable(term, error, place=place) from error


def unpicklable(
    term: str,
    why: Exception | str,
    what: str = "the term or its data",
    title: str = "",
    place: str = "process",
) -> UnpicklableError:
    """Build the error for an object that cannot be pickled, or not unpickled in the worker."""
    why = why if isinstance(why, str) else describe(why)
    return UnpicklableError(
        f"with run_in={place!r} everything must pickle, and {what} does not: "
        f"{why} ({title or term_title(term)}); {_CURES[place]}.",
        term=term,
    )


def _died(ticket: Ticket, error: ProcessExpired) -> WorkerDiedError:
    code = error.exitcode
    how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    return WorkerDiedError(
        f"the process that ran {ticket.title} must live until it has answered, and died "
        f"of {how}: look for what ends it{ticket.or_skip}.",
        term=ticket.term,
    )
