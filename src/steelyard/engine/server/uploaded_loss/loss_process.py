"""Runs uploaded losses in processes of their own, whose crash or memory costs no other client.

The allowlist and the budget keep losses from doing harm as far as they can foresee it. What they
do not foresee ends one of these processes and nothing else: the call fails, and the next one gets
a new process. The server sends a loss once, and the fields of a batch while the model runs forward;
then the log-probs. Values and gradients come back as JSON and bytes, which are parsed and not
unpickled.

As a rule there is one process. A loss that takes longer than a second is slow: it goes on in its
process with a low priority, while the losses of other clients run in another.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from tinker import types
from torch import Tensor

from steelyard.engine.server.uploaded_loss.budget import LossBudget, out_of_memory, out_of_time
from steelyard.engine.server.uploaded_loss.interpreter import (
    BoundLoss,
    LossResult,
    TracedLoss,
    with_gradients,
)
from steelyard.errors import InputError
from steelyard.execution.process_lifecycle import lead_group, worker_context
from steelyard.spec.error_messages import describe

_MAX_LOSSES = 64  # that the process keeps, the ones used last
_LOOK_SECONDS = 0.05  # between two looks at its memory
# Beyond the tensors that the budget counts: copies inside of operations, and Python's own.
_MEMORY_FACTOR, _SPARE_BYTES = 2, 2**28
_GRACE_SECONDS = 2.0  # for an operation that has begun when the time is used up
_PATIENCE = 5  # by the clock, times the CPU time: the cores may be busy with other work
_START_SECONDS = 600.0  # of a machine that is very busy
_NICENESS = 10  # of a slow loss: the engine goes first, where all cores are busy
SLOW_SECONDS = 1.0  # by the clock, after which a loss is slow
MAX_PROCESSES = 3  # the losses that run at once, of which two are slow
_DONE, _FAILED = b"done", b"failed"  # begin a reply


class LossProcesses:
    """Warm processes that run uploaded losses, each one loss at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._count = 0  # of the children, and of those that are being started
        self._warming = False
        self._closed = False

    def warm(self) -> None:
        """Start a process unless one waits for losses, without waiting for it."""
        with self._changed:
            if self._idle or self._warming or self._closed or self._count == MAX_PROCESSES:
                return
            self._warming = True
            self._count += 1
        name = "steelyard-loss-process"
        threading.Thread(target=self._warm, name=name, daemon=True).start()

    def bind(
        self, loss: TracedLoss, data: Sequence[types.Datum], budget: LossBudget
    ) -> ProcessedLoss:
        """Loss of a batch as a function of its log-probs, which runs in a process.

        Raises:
            InputError: a datum lacks a field, or a field has another rank.
        """
        return ProcessedLoss(self, loss, loss.read_fields(data), budget)

    def check(self, bound: ProcessedLoss) -> None:
        """Send a loss with its fields, and check it against its budget.

        Raises:
            InputError: the loss exceeds the budget, or ends the process.
        """
        self._call(bound, None)

    def run(self, bound: ProcessedLoss, logprobs: Sequence[Tensor]) -> LossResult:
        """Run a loss on the log-probs.

        Raises:
            InputError: the loss exceeds its budget, fails, or ends the process.
        """
        header, _, content = self._call(bound, logprobs).partition(b"\n")
        value, metrics = json.loads(header)
        # A copy: the bytes of a message cannot be written to.
        flat = torch.frombuffer(bytearray(content), dtype=torch.float32)
        rows = torch.split(flat, [row.numel() for row in logprobs])
        gradients = [g.reshape(row.shape) for g, row in zip(rows, logprobs, strict=True)]
        return LossResult(torch.tensor(value, dtype=torch.float64), gradients, metrics)

    def close(self) -> None:
        """End the processes; the calls that they run fail."""
        with self._changed:
            self._closed = True
            for child in self._children:
                child.kill()
            self._changed.notify_all()
            # One that is starting ends itself when it has started.
            self._changed.wait_for(lambda: self._count == len(self._idle), _GRACE_SECONDS)
            for child in self._idle:
                self._end(child)
            self._idle.clear()

    def _warm(self) -> None:
        try:
            with contextlib.suppress(InputError, OSError):
                self._give_back(self._start())
        finally:
            with self._changed:
                self._warming = False
                self._changed.notify_all()

    def _call(self, bound: ProcessedLoss, logprobs: Sequence[Tensor] | None) -> bytes:
        """Exchange messages with a process, and with a second one if it ends.

        It may have ended before, for no fault of this loss.
        """
        try:
            return self._exchange(bound, logprobs)
        except _EndedError:
            pass
        try:
            return self._exchange(bound, logprobs)
        except _EndedError as error:
            raise InputError(
                f"the loss {bound.name!r} must not end the process that runs it, and that died "
                f"of {error} twice: leave out what it did last, or send fewer or shorter data."
            ) from error

    def _exchange(self, bound: ProcessedLoss, logprobs: Sequence[Tensor] | None) -> bytes:
        """Send a loss with its data, unless a process has both, and the log-probs."""
        child = self._take(bound)
        try:
            reply = b""
            if logprobs is None or child.bound is not bound:
                child.bind(bound)
                reply = child.reply(bound)
            if logprobs is not None:
                child.send([row.numpy() for row in logprobs])
                reply = child.reply(bound)
        except (EOFError, OSError) as error:
            raise _EndedError(child.wait_for_end()) from error
        finally:
            self._give_back(child)
        return reply

    def _take(self, bound: ProcessedLoss) -> _Child:
        """Idle process, best the one that has the loss; a new one if there is none."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._idle
                    or self._closed
                    or (self._count < MAX_PROCESSES and not self._warming)
                )
            )
            for child in [idle for idle in self._idle if not idle.is_alive]:
                self._idle.remove(child)
                self._end(child)
            if self._idle and not self._closed:
                child = max(self._idle, key=lambda idle: idle.fit(bound))
                self._idle.remove(child)
                return child
            self._count += 1
        return self._start()

    def _give_back(self, child: _Child) -> None:
        """Keep one process for later calls; not one that failed, nor a slow one's low priority."""
        with self._changed:
            is_kept = child.is_idle and not child.is_slow and not self._idle and not self._closed
            if is_kept:
                self._idle.append(child)
            else:
                self._end(child)
            self._changed.notify_all()
        if not is_kept:
            self.warm()

    def _start(self) -> _Child:
        """Start a process, which is counted already."""
        child = None
        try:
            if not self._closed:
                child = _Child()
        finally:
            with self._changed:
                if child is None:
                    self._count -= 1
                elif self._closed:  # meanwhile
                    self._end(child)
                    child = None
                else:
                    self._children.add(child)
                self._changed.notify_all()
        if child is None:
            raise InputError("a custom loss needs a server that runs, and this one is stopping.")
        return child

    def _end(self, child: _Child) -> None:
        child.close()
        self._children.discard(child)
        self._count -= 1


class ProcessedLoss:
    """An uploaded loss over the data of one batch, run in a process; called with log-probs.

    Args:
        processes: run it.
        loss: the loss.
        fields: for each datum, the target tokens and the fields that the loss reads.
        budget: the memory and the time that it may take.

    Attributes:
        on_slow: called once it has taken `SLOW_SECONDS`.
    """

    def __init__(
        self,
        processes: LossProcesses,
        loss: TracedLoss,
        fields: Sequence[Sequence[Tensor]],
        budget: LossBudget,
    ) -> None:
        self._processes = processes
        self.loss, self.name, self.fields, self.budget = loss, loss.name, fields, budget
        self.on_slow: Callable[[], object] = lambda: None

    def check(self) -> None:
        """Check that the loss is within its budget, without running it.

        Raises:
            InputError: it is not, or it ends the process.
        """
        self._processes.check(self)

    def __call__(self, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Sum of the losses of all data, with its gradient, and the metrics.

        Raises:
            InputError: an operation fails, the loss exceeds its budget or ends the process, or it
                is not finite.
        """
        return with_gradients(
            self._processes.run(self, [row.detach() for row in logprobs]), logprobs
        )


class _EndedError(Exception):
    """The process has ended; says how."""


class _Child:
    """The process, as the server sees it."""

    def __init__(self) -> None:
        self.bound: ProcessedLoss | None = None
        self.is_idle, self.is_slow = True, False
        self._losses: OrderedDict[str, None] = OrderedDict()
        context = worker_context(preload=__name__)
        self._connection, theirs = context.Pipe()
        # The context has our own class of processes, of which multiprocessing's types know nothing.
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, torch.get_num_threads()), daemon=True
        )
        self._process.start()
        theirs.close()
        self._started = False
        self._idle_bytes = 0

    @property
    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def fit(self, bound: ProcessedLoss) -> int:
        """How much of a loss it has already: the loss itself, and the data."""
        return (bound.loss.key in self._losses) + (self.bound is bound)

    def bind(self, bound: ProcessedLoss) -> None:
        """Send a loss, unless the process has it, and the fields of a batch."""
        self.bound = None
        self._await_start()
        loss = bound.loss
        graph = None if loss.key in self._losses else (loss.name, [*loss.inputs], [*loss.nodes])
        self._losses[loss.key] = None
        self._losses.move_to_end(loss.key)
        forgotten = []
        while len(self._losses) > _MAX_LOSSES:
            forgotten.append(self._losses.popitem(last=False)[0])
        fields = [[tensor.numpy() for tensor in tensors] for tensors in bound.fields]
        self.send((loss.key, graph, forgotten, fields, bound.budget))
        self.bound = bound

    def send(self, message: Any) -> None:
        self.is_idle = False
        self._connection.send_bytes(pickle.dumps(message))

    def reply(self, bound: ProcessedLoss) -> bytes:
        """Wait for the reply, and end the process if it takes too long or too much memory.

        Raises:
            InputError: the loss failed in the process, or was ended.
            EOFError: the process has ended.
        """
        name, budget = bound.name, bound.budget
        began, used = time.monotonic(), None
        longest = budget.seconds + _GRACE_SECONDS
        largest = self._idle_bytes + _MEMORY_FACTOR * budget.max_bytes + _SPARE_BYTES
        while not self._connection.poll(_LOOK_SECONDS):
            seconds = time.monotonic() - began
            if seconds > SLOW_SECONDS and not self.is_slow:
                self._slow_down()
                bound.on_slow()
            cpu_seconds = self._cpu_seconds()
            if used is None:  # at the first look: as a rule the reply is there before
                used = cpu_seconds
            if seconds > _PATIENCE * longest or cpu_seconds - used > longest:
                self.kill()
                raise out_of_time(name, budget.seconds)
            if self._memory() > largest:
                self.kill()
                raise out_of_memory(name, budget.max_bytes)
        kind, content = self._connection.recv_bytes(), self._connection.recv_bytes()
        self.is_idle = True
        if kind != _DONE:
            raise InputError(content.decode("utf-8", errors="replace"))
        return content

    def wait_for_end(self) -> str:
        """Wait for the end of the process, and say how it ended."""
        self._process.join(_GRACE_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.join()
        self._connection.close()

    def _slow_down(self) -> None:
        """Lower its priority, which cannot be raised again."""
        self.is_slow = True
        if not hasattr(os, "setpriority"):
            return
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            # On Linux each thread has a priority of its own.
            for thread in psutil.Process(self._process.pid).threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, _NICENESS)

    def _await_start(self) -> None:
        """Wait until the process has imported what it needs; not part of the time of a loss."""
        if self._started:
            return
        if not self._connection.poll(_START_SECONDS):
            raise EOFError
        self._connection.recv_bytes()
        self._started, self._idle_bytes = True, self._memory()

    def _cpu_seconds(self) -> float:
        """CPU time of its main thread, which waits for nothing but the cores."""
        try:
            threads = psutil.Process(self._process.pid).threads()
        except psutil.Error:  # it has ended, as below; or the system does not tell
            return 0.0
        own = [t for t in threads if t.id == self._process.pid]
        return float(sum(thread.user_time + thread.system_time for thread in own))

    def _memory(self) -> int:
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:  # it has ended: reading the reply says so
            return 0


def _serve(connection: Connection, threads: int) -> None:
    """Run in the process: answer each message until the server closes the connection."""
    lead_group()
    _write_no_core()
    torch.set_num_threads(threads)  # as many as the server
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    losses: dict[str, TracedLoss] = {}
    bound: BoundLoss | None = None
    try:
        connection.send_bytes(b"ready")
    except OSError:  # the server has stopped meanwhile
        return
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())  # noqa: S301 - the server's
        except (EOFError, OSError):
            return
        try:
            if isinstance(message, tuple):
                bound = None  # the loss before is not run on the data of one that fails here
                bound = _bind(losses, *message)
                bound.check()
                content = b""
            else:
                assert bound is not None  # noqa: S101 - the server binds a loss first
                content = _run(bound, [torch.from_numpy(row) for row in message])
        except InputError as error:
            kind, content = _FAILED, str(error).encode()
        except Exception as error:  # noqa: BLE001 - reported to the client
            kind, content = _FAILED, f"a custom loss failed: {describe(error)}".encode()
        else:
            kind = _DONE
        connection.send_bytes(kind)
        connection.send_bytes(content)


def _write_no_core() -> None:
    """Let a crash write no image of the memory: a client could fill the disk with them."""
    try:
        import resource  # noqa: PLC0415 - there is none on Windows
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bind(
    losses: dict[str, TracedLoss],
    key: str,
    graph: tuple[Any, Any, Any] | None,
    forgotten: Sequence[str],
    fields: Sequence[Sequence[Any]],
    budget: LossBudget,
) -> BoundLoss:
    for gone in forgotten:
        del losses[gone]
    if graph is not None:
        losses[key] = TracedLoss(*graph)
    tensors = [[torch.from_numpy(array) for array in arrays] for arrays in fields]
    return BoundLoss(losses[key], tensors, budget)


def _run(bound: BoundLoss, logprobs: list[Tensor]) -> bytes:
    result = bound.run(logprobs)
    header = json.dumps([result.value.item(), result.metrics])
    flat = torch.cat([gradient.float().reshape(-1) for gradient in result.gradients])
    return header.encode() + b"\n" + flat.numpy().tobytes()
