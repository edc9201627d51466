"""Helpers for tests that run tickets on workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.workers import Workers


def run(workers: Workers, *tickets: Ticket, width: int = 2) -> None:
    with Batch(tickets, workers.executors, width) as batch:
        list(batch.settled())


def job(fn: Any, *args: Any, timeout: float = 300.0) -> Ticket:
    return Ticket(getattr(fn, "__name__", "term"), "process", fn, args, timeout)


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a condition; fail after ten minutes."""
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(pid: int) -> bool:
    """Whether a process has ended, also when its parent has yet to notice."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def memory_files() -> int:
    """Number of files in memory that this process holds open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += str(link.readlink()).startswith("/memfd:steelyard")
        except FileNotFoundError:  # that of the scan itself
            continue
    return count
