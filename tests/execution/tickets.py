"""Helpers for tests that run tickets on workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from steelyard.execution import Batch, Ticket, Workers


def run(workers: Workers, *tickets: Ticket) -> None:
    with Batch(tickets, workers.executors, 2) as batch:
        list(batch.settled())


def job(fn: Any, *args: Any, timeout: float = 20.0) -> Ticket:
    return Ticket(getattr(fn, "__name__", "term"), "process", fn, args, timeout)


def wait_until(true: Callable[[], bool], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
