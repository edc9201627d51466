"""`RayExecutor`: runs tickets as tasks on a Ray cluster, so that terms can use other machines."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from steelyard._extras import require
from steelyard.errors import ClosedError, InputError, PlacementError, TermError, WorkerDiedError
from steelyard.execution import worker_process
from steelyard.execution.executor import Cancelled, Executor, Ticket
from steelyard.execution.processes import check_picklable, unpicklable
from steelyard.execution.transport import Parts, pack, unpack
from steelyard.spec.error_messages import describe

_LOG = logging.getLogger(__name__)


class RayConnection:
    """This process's connection to Ray, made when first used if the user has not made one.

    The connection belongs to the whole process. One that was made here ends with its last user.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._own_job: str | None = None
        self._is_parents = False

    def open(self, user: object) -> None:
        """Connect as `ray.init()` does, unless the process is connected.

        That is to the cluster of `RAY_ADDRESS`, else to one that runs on this machine
        (`ray start --head`), else to a new one on this machine.

        Raises:
            ClosedError: the connection is that of the parent, from which this process was forked.
            InputError: it is, or would be, a connection by the Ray Client.
        """
        if self._is_parents:
            raise ClosedError(
                "a process must have a connection of its own to Ray, and this one was forked from "
                "a process that is connected: start it with the method 'spawn', or fork before "
                "Ray is used."
            )
        ray = ray_module()
        with self._lock:
            _check_not_client()
            if not ray.is_initialized():
                ray.init()
                self._own_job = _job()
                totals = ray.cluster_resources()
                _LOG.info(
                    "Terms with run_in='ray' run on the Ray cluster at %s: %d nodes, %g CPUs, "
                    "%g GPUs.",
                    ray.get_runtime_context().gcs_address,
                    len(nodes()),
                    totals.get("CPU", 0),
                    totals.get("GPU", 0),
                )
            self._users.add(user)

    def close(self, user: object) -> None:
        """End the connection if it was made here and nobody else uses it.

        A cluster that it has started ends with it; any other goes on.
        """
        with self._lock:
            self._users.discard(user)
            if self._users or self._own_job is None or not is_connected():
                return
            if _job() == self._own_job:  # else the user has connected anew
                ray_module().shutdown()
            self._own_job = None

    def forget_parents(self) -> None:
        """In a forked child: note that the parent's connection cannot be used here.

        Its threads are the parent's, so that any call would wait for ever.
        """
        self._is_parents = is_connected()
        self._lock, self._users, self._own_job = threading.Lock(), set(), None


def ray_module() -> Any:
    """Import Ray, which is an extra and takes a second."""
    import ray  # noqa: PLC0415 - see above

    return ray


def _check_not_client() -> None:
    client = ray_module().util.client.ray.is_connected()
    if client or (not is_connected() and os.environ.get("RAY_ADDRESS", "").startswith("ray://")):
        raise InputError(
            "run_in='ray' needs a process on a machine of the cluster, got a connection by the Ray "
            "Client ('ray://…'), which does not tell when a task starts: run the program on such "
            "a machine, or as a job (ray job submit)."
        )


def is_connected() -> bool:
    """Whether this process is connected to Ray."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def nodes() -> list[dict[str, float]]:
    """Resources of each node that is alive, by name, in total."""
    return [node["Resources"] for node in ray_module().nodes() if node["Alive"]]


# Keys of `resources` that are options of Ray's tasks; any other one is a custom resource.
_TASK_OPTIONS = ("num_cpus", "num_gpus", "runtime_env")


def lacking(resources: Mapping[str, Any], cluster: list[dict[str, float]]) -> str | None:
    """Compare the resources of a task with the nodes, one of which must have all of them.

    Returns:
        What is asked for and what there is, if no node has it; else None.

    Example:
        >>> lacking({"num_gpus": 1}, [{"CPU": 2.0}, {"CPU": 8.0}])
        'CPU 1, GPU 1; the nodes have CPU 2 | CPU 8'
        >>> lacking({"num_gpus": 1}, [{"CPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}])
    """
    amounts = {
        "CPU": resources.get("num_cpus", 1),  # Ray's default
        "GPU": resources.get("num_gpus", 0),
        **{name: amount for name, amount in resources.items() if name not in _TASK_OPTIONS},
    }
    needed = {name: amount for name, amount in amounts.items() if amount}
    if any(all(node.get(name, 0) >= needed[name] for name in needed) for node in cluster):
        return None
    there = " | ".join(_listed({n: node[n] for n in amounts if n in node}) for node in cluster)
    return f"{_listed(needed)}; the nodes have {there}"


def task_options(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a task, in which Ray has the custom resources under a key of their own.

    Example:
        >>> task_options({"num_gpus": 1, "judge_node": 1})
        {'num_gpus': 1, 'resources': {'judge_node': 1}}
    """
    options = {key: value for key, value in resources.items() if key in _TASK_OPTIONS}
    custom = {key: value for key, value in resources.items() if key not in _TASK_OPTIONS}
    return {**options, "resources": custom} if custom else options


def _listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items()) or "none of it"


def _job() -> str:
    job: str = ray_module().get_runtime_context().get_job_id()
    return job


connection = RayConnection()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=connection.forget_parents)


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
        # Remote functions by resources: setting the options anew would cost each call 0.1 ms.
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
            small = [argument if isinstance(argument, list) else None for argument in shared]
            call = pack((ticket.fn, ticket.args), ticket.shared)
        except ray_module().exceptions.RayError as error:
            ticket.end(error=_failure(ticket, error))
            return
        except Exception as error:  # noqa: BLE001 - pickling runs user code
            ticket.end(error=unpicklable(ticket.term, error, title=ticket.title, place="ray"))
            return
        large = (argument for argument in shared if not isinstance(argument, list))
        try:
            task = self._function(ticket.resources).remote(call, small, *large)
        except ray_module().exceptions.RayError as error:
            ticket.end(error=_failure(ticket, error))
            return
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
        if self._thread is not None and is_connected():
            return
        with self._lock:
            connection.open(self)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._attend, name="steelyard-ray", daemon=True
                )
                self._thread.start()

    def _function(self, resources: Mapping[str, Any]) -> Any:
        """The remote function that asks for these resources."""
        key = repr(resources)
        if key not in self._functions:
            if not self._functions:
                as_task = ray_module().remote(num_returns="streaming", max_retries=0)
                self._functions[""] = as_task(worker_process.work_in_task)
            self._functions[key] = self._functions[""].options(**task_options(resources))
        return self._functions[key]

    def _attend(self) -> None:
        """Settle the tickets whose tasks have ended.

        In a thread of its own: the next ticket may be submitted then, which would block Ray's
        thread that it waits for.
        """
        look_at = monotonic() + _LOOK_INTERVAL
        while True:
            try:
                entry = self._ended.get(timeout=max(0.0, look_at - monotonic()))
            except Empty:
                with contextlib.suppress(Exception):  # the cluster may be out of reach for a moment
                    self._look_at_waiting()
                look_at = monotonic() + _LOOK_INTERVAL
                continue
            if entry is None:
                return
            self._settle(*entry)
            del entry

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
        if is_connected():  # else Ray would connect anew
            ray_module().cancel(task, force=True)
        ticket.ended = monotonic()

    def _look_at_waiting(self) -> None:
        """Fail the tasks that can never start."""
        fail: Callable[[Ticket], TermError | ClosedError | None]
        if not is_connected():
            waiting, fail = list(self._tasks), _shut_down
        else:
            soon = monotonic() - _LOOK_INTERVAL
            waiting = [
                ticket
                for ticket in list(self._tasks)
                if ticket.started is None and (ticket.submitted or soon) < soon
            ]
            fail = partial(_infeasible, nodes() if waiting else [])
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
    )
    if isinstance(error, exceptions.LocalRayletDiedError):
        return WorkerDiedError(
            f"Ray must live on this machine while {ticket.title} runs on it, and its process here, "
            f"the raylet, died: start Ray again (ray start), and then this program; "
            f"'steelyard resume' goes on with a run.",
            term=ticket.term,
        )
    if isinstance(error, exceptions.ObjectStoreFullError | exceptions.OutOfDiskError):
        return TermError(
            f"Ray's object store must have room for the data and the result of {ticket.title}, and "
            f"it is full, on disk too: free space where Ray keeps its files (/tmp/ray), start it "
            f"with a larger --object-store-memory, or use smaller batches.",
            term=ticket.term,
        )
    if isinstance(error, died):
        return WorkerDiedError(
            f"the process that ran {ticket.title} must live until it has answered, and it or its "
            f"node died ({_reason(error)}): look for what ends it{ticket.or_skip}.",
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
    missing = lacking(ticket.resources, cluster)
    if missing is None:
        return None
    return PlacementError(
        f"one node of the Ray cluster must have all that {ticket.title} asks for, and none does: "
        f"{missing}. Ask for less in its resources, or add such a node; a cluster that scales by "
        f"itself must have one up, see ray.autoscaler.sdk.request_resources.",
        term=ticket.term,
    )
