from __future__ import annotations

import os
import threading
import time

from steelyard.execution import Ticket, Workers
from steelyard.execution.threads import ThreadExecutor

from .tickets import run


def test_threads_are_used_again_and_ended() -> None:
    before = set(threading.enumerate())
    workers = Workers()
    seen = set()
    for _ in range(20):
        ticket = Ticket("t", "thread", threading.get_ident, ())
        run(workers, ticket)
        seen.add(ticket.result())
    assert len(seen) <= 2
    workers.close()
    assert set(threading.enumerate()) <= before


def test_a_thread_that_comes_back_late_finds_the_door_closed() -> None:
    before = threading.active_count()
    executor = ThreadExecutor()
    go = threading.Event()
    executor.submit(Ticket("t", "thread", go.wait, ()))
    executor.close()
    go.set()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before


def test_no_more_idle_threads_are_kept_than_are_of_use() -> None:
    before = threading.active_count()
    with Workers() as workers:
        barrier = threading.Barrier(30)
        tickets = [Ticket(f"t{i}", "thread", barrier.wait, (), 20.0) for i in range(30)]
        run(workers, *tickets, width=30)
        deadline = time.monotonic() + 5
        kept = before + max(2, os.cpu_count() or 1)
        while threading.active_count() > kept and time.monotonic() < deadline:
            time.sleep(0.001)
        assert threading.active_count() <= kept
