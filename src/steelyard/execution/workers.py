"""`Workers`: the threads, processes, event loop and Ray tasks that run offloaded terms."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Self

from steelyard.errors import ClosedError, SpecError
from steelyard.execution.executor import Executor
from steelyard.execution.process_lifecycle import forget_parents_processes
from steelyard.execution.processes import ProcessExecutor
from steelyard.execution.ray_tasks import RayExecutor
from steelyard.execution.threads_and_coroutines import CoroutineExecutor, ThreadExecutor
from steelyard.spec.checks import is_whole


class Workers:
    """The pools that run offloaded terms; started when first used, kept warm until closed.

    All pipelines of a process share one, unless they are given their own.

    Args:
        processes: how many worker processes may be busy at once; None is one per core.

    Example:
        >>> from steelyard import Pipeline, Workers
        >>> import torch
        >>> with Workers(processes=1) as workers:
        ...     pipeline = Pipeline(lambda data, logprobs: logprobs.sum(), [], workers=workers)
        ...     pipeline.compute([], torch.tensor([1.0, 2.0])).loss_total
        3.0
    """

    def __init__(self, processes: int | None = None) -> None:
        cores = os.cpu_count() or 1
        count = cores if processes is None else processes
        if not is_whole(count, at_least=1):
            raise SpecError(f"processes must be a whole number >= 1, got {processes!r}.")
        self._count = count
        self._closed = False
        self._make_executors()
        _all_workers.add(self)

    def _make_executors(self) -> None:
        self.threads = ThreadExecutor()
        self.processes = ProcessExecutor(self._count)
        _all_processes.add(self.processes)
        self.coroutines = CoroutineExecutor()
        # A new place to run terms is added here, under its `run_in` name.
        self._executors: dict[str, Executor] = {
            "thread": self.threads,
            "process": self.processes,
            "async": self.coroutines,
            "ray": RayExecutor(),
        }

    @property
    def executors(self) -> dict[str, Executor]:
        """The executors by their `run_in` names.

        Raises:
            ClosedError: the workers are closed.
        """
        if self._closed:
            raise ClosedError("these workers must be open to run terms, got closed ones.")
        return self._executors

    def close(self) -> None:
        """End all threads, processes and event loops; a stuck thread ends when its work does."""
        self._closed = True
        for executor in reversed(self._executors.values()):
            executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()
# Also of workers that nobody refers to any more: a pool lives on until it is closed.
_all_processes: weakref.WeakSet[ProcessExecutor] = weakref.WeakSet()
_lock = threading.Lock()
_default: Workers | None = None


def default_workers() -> Workers:
    """The workers that all pipelines of the process share."""
    global _default  # noqa: PLW0603 - one for the process
    with _lock:
        if _default is None:
            _default = Workers()
        return _default


@atexit.register
def _close_all() -> None:
    """Close all workers, before pebble's own function at exit, which is registered earlier.

    That one ends the workers of the pools, which would count as broken and be replaced.
    """
    for workers in list(_all_workers):
        workers.close()
    for executor in list(_all_processes):
        executor.close()


def _start_anew() -> None:
    """In a forked child: replace the executors, whose threads and processes are the parent's."""
    global _default, _lock
    _default, _lock = None, threading.Lock()
    forget_parents_processes()
    _all_processes.clear()
    for workers in _all_workers:
        workers._make_executors()  # noqa: SLF001 - of this module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
