from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from steelyard.errors import ClosedError, SpecError, TermTimeoutError
from steelyard.execution import Batch, Ticket, Workers, default_workers
from steelyard.execution.threads import ThreadExecutor


def run(workers: Workers, *tickets: Ticket) -> None:
    with Batch(tickets, workers.executors, 2) as batch:
        list(batch.settled())


@pytest.mark.parametrize("processes", [0, -1, 1.5, True, "2"])
def test_a_bad_number_of_processes(processes: Any) -> None:
    with pytest.raises(SpecError, match="processes must be a whole number >= 1, got"):
        Workers(processes=processes)


def test_closed_workers_say_so() -> None:
    workers = Workers()
    workers.close()
    with pytest.raises(ClosedError, match="these workers must be open"):
        _ = workers.executors


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
        run(workers, *tickets)
        deadline = time.monotonic() + 5
        kept = before + max(2, os.cpu_count() or 1)
        while threading.active_count() > kept and time.monotonic() < deadline:
            time.sleep(0.001)
        assert threading.active_count() <= kept


def test_a_coroutine_that_blocks_the_loop_is_given_up_on() -> None:
    release = threading.Event()

    async def block() -> None:
        release.wait(20)

    async def fine() -> int:
        return 1

    with Workers() as workers:
        blocking = Ticket("blocking", "async", block, (), 0.1)
        run(workers, blocking)
        with pytest.raises(TermTimeoutError):
            blocking.result()
        assert blocking.running
        workers.coroutines.abandon()
        after = Ticket("fine", "async", fine, (), 5.0)
        run(workers, after)
        assert after.result() == 1
        release.set()


def test_a_loop_that_turns_is_not_given_up_on() -> None:
    async def loop() -> int:
        return id(asyncio.get_running_loop())

    with Workers() as workers:
        first, second = (Ticket(n, "async", loop, ()) for n in "ab")
        run(workers, first)
        workers.coroutines.abandon()
        run(workers, second)
        assert first.result() == second.result()


def test_closing_cancels_what_runs_on_the_loop() -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    workers = Workers()
    with Batch([Ticket("w", "async", wait, ())], workers.executors, 2):
        assert begun.wait(5)
        workers.close()
        assert cancelled.wait(5)


def test_a_forked_child_has_workers_of_its_own() -> None:
    parents = default_workers()
    assert default_workers() is parents
    pid = os.fork()
    if pid == 0:
        os._exit(0 if default_workers() is not parents else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert default_workers() is parents


def test_the_interpreter_exits_at_once_whatever_still_runs() -> None:
    script = (
        "import time, torch\n"
        "from steelyard import compute\n"
        "spec = {'fn': lambda d, lp: time.sleep(60), 'weight': 1, 'name': 's',\n"
        "        'run_in': 'thread', 'timeout': 0.1, 'on_error': 'skip'}\n"
        "out = compute([], [torch.ones(1)], lambda d, lp: lp[0].sum(), regularizers=[spec])\n"
        "print(out.skipped['s'][:16])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "TermTimeoutError\n"
