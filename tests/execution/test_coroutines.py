from __future__ import annotations

import asyncio
import threading

import pytest

from steelyard.errors import TermTimeoutError
from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.workers import Workers

from .tickets import run


def test_a_coroutine_that_blocks_the_loop_is_given_up_on() -> None:
    release = threading.Event()

    async def block() -> None:
        release.wait(600)

    async def fine() -> int:
        return 1

    with Workers() as workers:
        blocking = Ticket("blocking", "async", block, (), 0.1)
        run(workers, blocking)
        with pytest.raises(TermTimeoutError):
            blocking.result()
        assert blocking.running
        workers.coroutines.abandon()
        after = Ticket("fine", "async", fine, (), 300.0)
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
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    workers = Workers()
    with Batch([Ticket("w", "async", wait, ())], workers.executors, 2):
        assert begun.wait(600)
        workers.close()
        assert cancelled.wait(60)
