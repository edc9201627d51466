"""`RayExecutor`: runs tickets as tasks on a Ray cluster, so that terms can use other machines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from steelyard._extras import require
from steelyard.errors import ClosedError, PlacementError, TermError, WorkerDiedError
from steelyard.execution import ray_connection, worker_process
from steelyard.execution.batch import Cancelled, Ticket
from steelyard.execution.executor import Executor
from steelyard.execution.processes import check_picklable, unpicklable
from steelyard.execution.ray_connection import connection, ray_module
from steelyard.execution.transport import Parts, pack, unpack
from steelyard.spec import describe

# Seconds between two looks at the tasks that have not started.
_LOOK_INTERVAL = 1.0
# From this size on, in bytes, Ray keeps an argument in its object store anyway.
_LARGE = 100 * 1024


class RayExecutor(Executor):
    """Tasks on a Ray cluster: each is tried once, and a timeout kills the process that runs it.

    Ray decides how many run at once, by the CPUs, GPUs and other resources that they ask for.
    """

    limited = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[Ticket, Any] = {}
        self._ended: SimpleQueue[tuple[Ticket, Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Remote functions by placement: setting the options anew would cost each call 0.1 ms.
        self._functions: dict[str, Any] = {}

    def prepare(self, term: str, call: object) -> None:
        """Check that Ray is installed and that a call pickles; the cluster is not needed yet.

        Raises:
            MissingExtraError: Ray is not installed.
            UnpicklableError: the call does not pickle.
        """
        require("ray", "run_in='ray'")
        check_picklable(term, call, "ray")

    def submit(self, ticket: Ticket) -> None:
        """Submit the ticket as a task; the first one connects to Ray."""
        self._connect()
        try:
            shared = [_sent(thing, ticket.sent) for thing in ticket.shared]
            small = [each if isinstance(each, list) else None for each in shared]
            call = pack((ticket.fn, ticket.args), ticket.shared)
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            ticket.end(error=unpicklable(ticket.term, error, title=ticket.title, place="ray"))
            return
        large = (each for each in shared if not isinstance(each, list))
        task = self._function(ticket.placement).remote(call, small, *large)
        self._tasks[ticket] = task
        ticket.stop = partial(self._stop, ticket, task)
        # Ray's public ways to wait for a generator block a thread each, or take an event loop,
        # whose detour costs a third of a task.
        started, answered = task._get_next_ref_n(2)  # noqa: SLF001
        started.future().add_done_callback(partial(_begin, ticket))
        answered.future().add_done_callback(lambda future: self._ended.put((ticket, future)))
        if ticket.settled:  # it was cancelled meanwhile
            ticket.stop()

    def deadline(self, ticket: Ticket) -> float | None:
        """Time at which the caller has the task killed; a queued task has none."""
        return None if ticket.started is None else ticket.started + (ticket.timeout or 0.0)

    def close(self) -> None:
        """Kill the running tasks, and end the connection to Ray if it was made here."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ended.put(None)
        thread.join()
        for ticket, task in list(self._tasks.items()):
            self._stop(ticket, task)
            ticket.end(error=ClosedError("the workers were closed while a term ran on them."))
        connection.close(self)

    def _connect(self) -> None:
        if self._thread is not None and ray_connection.is_connected():
            return
        with self._lock:
            connection.open(self)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._attend, name="steelyard-ray", daemon=True
                )
                self._thread.start()

    def _function(self, placement: Mapping[str, Any]) -> Any:
        """The remote function that asks for a placement."""
        key = repr(placement)
        if key not in self._functions:
            if not self._functions:
                as_task = ray_module().remote(num_returns="streaming", max_retries=0)
                self._functions[""] = as_task(worker_process.work_in_task)
            self._functions[key] = self._functions[""].options(**placement)
        return self._functions[key]

    def _attend(self) -> None:
        """Settle the tickets whose tasks have ended.

        In a thread of its own: the next ticket may be submitted then, which would block Ray's
        thread that it waits for.
        """
        look_at = monotonic() + _LOOK_INTERVAL
        while True:
            try:
                found = self._ended.get(timeout=max(0.0, look_at - monotonic()))
            except Empty:
                with contextlib.suppress(Exception):  # the cluster may be out of reach for a moment
                    self._look_at_waiting()
                look_at = monotonic() + _LOOK_INTERVAL
                continue
            if found is None:
                return
            self._settle(*found)
            del found

    def _settle(self, ticket: Ticket, future: Future[Any]) -> None:
        if self._tasks.pop(ticket, None) is None or ticket.settled:
            return
        try:
            value, error = _opened(ticket, *future.result())
        except Exception as failure:  # noqa: BLE001 - raised where the ticket is waited for
            value, error = None, _failure(ticket, failure)
        if ticket.started is None and error is None:
            ticket.start()
        ticket.end(value, error)

    def _stop(self, ticket: Ticket, task: Any) -> None:
        self._tasks.pop(ticket, None)
        if ray_connection.is_connected():  # else Ray would connect anew
            ray_module().cancel(task, force=True)
        ticket.ended = monotonic()

    def _look_at_waiting(self) -> None:
        """Fail the tasks that can never start."""
        fail: Callable[[Ticket], TermError | ClosedError | None]
        if not ray_connection.is_connected():
            waiting, fail = list(self._tasks), _shut_down
        else:
            soon = monotonic() - _LOOK_INTERVAL
            waiting = [
                ticket
                for ticket in list(self._tasks)
                if ticket.started is None and (ticket.submitted or soon) < soon
            ]
            fail = partial(_infeasible, ray_connection.nodes() if waiting else [])
        for ticket in waiting:
            task, error = self._tasks.get(ticket), fail(ticket)
            if task is not None and error is not None:
                self._stop(ticket, task)
                ticket.end(error=error)


def _sent(thing: object, sent: dict[int, Any]) -> Any:
    """The packed object, for all tickets of a batch; a large one is in Ray's object store."""
    if id(thing) not in sent:
        parts = pack(thing)
        kept = ray_module().put(parts) if sum(map(len, parts)) >= _LARGE else parts
        sent[id(thing)] = thing, kept  # with the object: no other one may take its id
    return sent[id(thing)][1]


def _begin(ticket: Ticket, told: Future[None]) -> None:
    if told.exception() is None and ticket.started is None:
        ticket.start()


def _opened(ticket: Ticket, succeeded: bool, parts: Parts) -> tuple[Any, BaseException | None]:
    try:
        answer = unpack(parts)
    except Exception as error:  # noqa: BLE001 - unpickling runs user code
        return None, unpicklable(ticket.term, error, "its result", ticket.title, "ray")
    if succeeded:
        return answer, None
    if isinstance(answer, worker_process.TransportError):
        return None, unpicklable(ticket.term, answer.why, answer.what, ticket.title, "ray")
    return None, answer


def _failure(ticket: Ticket, error: Exception) -> BaseException:
    """The error for a task that has not answered."""
    exceptions = ray_module().exceptions
    if isinstance(error, exceptions.TaskCancelledError):
        return Cancelled()
    died = (
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
        exceptions.OutOfMemoryError,
        exceptions.ObjectLostError,
        exceptions.LocalRayletDiedError,
    )
    if isinstance(error, died):
        return WorkerDiedError(
            f"the process that ran {ticket.title} must live until it has answered, and it or its "
            f"node died ({_reason(error)}): look for what ends it, or set its on_error to go "
            f"on without it.",
            term=ticket.term,
        )
    if isinstance(error, exceptions.RuntimeEnvSetupError):
        return TermError(
            f"the runtime_env of {ticket.title} must be one that its node can set up, and it could "
            f"not: {_reason(error)}",
            term=ticket.term,
        )
    return TermError(
        f"{ticket.title} must be able to start on its node, and could not: {_reason(error)}; "
        f"install the same steelyard and Python there as here.",
        term=ticket.term,
    )


def _reason(error: Exception) -> str:
    """The line that tells most: of a task's error the last one, after its traceback."""
    lines = str(error).strip().splitlines() or [describe(error)]
    return lines[-1 if isinstance(error, ray_module().exceptions.RayTaskError) else 0]


def _shut_down(_: Ticket) -> ClosedError:
    return ClosedError("Ray must stay connected while terms run on it, and was shut down.")


def _infeasible(cluster: list[dict[str, float]], ticket: Ticket) -> PlacementError | None:
    lacking = ray_connection.lacking(ticket.placement, cluster)
    if lacking is None:
        return None
    return PlacementError(
        f"one node of the Ray cluster must have all that {ticket.title} asks for, and none does: "
        f"{lacking}. Ask for less in its options, or add such a node; a cluster that scales by "
        f"itself must have one up, see ray.autoscaler.sdk.request_resources.",
        term=ticket.term,
    )
