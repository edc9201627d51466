"""What every executor must do, whatever it runs on."""

from __future__ import annotations

import asyncio
import time

import pytest

from steelyard.errors import TermTimeoutError
from steelyard.execution.executor import Ticket
from steelyard.execution.workers import Workers

from .every_executor import double, hang, run, ticket


def fail(x: int) -> int:
    raise KeyError(x)


def leave() -> None:
    raise SystemExit(3)


def test_every_ticket_is_settled_once_with_its_own_result(workers: Workers, executor: str) -> None:
    tickets = [ticket(executor, double, i) for i in range(12)]
    settled = run(workers, tickets)
    assert sorted(map(id, settled)) == sorted(map(id, tickets))
    assert [t.result() for t in tickets] == [2 * i for i in range(12)]
    assert all(t.started is not None and t.ended is not None for t in tickets)
    assert not any(t.running for t in tickets)


def test_a_failure_concerns_one_ticket(workers: Workers, executor: str) -> None:
    good, bad, also_good = (ticket(executor, fn, 7) for fn in (double, fail, double))
    run(workers, [good, bad, also_good])
    assert (good.result(), also_good.result()) == (14, 14)
    with pytest.raises(KeyError, match="7"):
        bad.result()


def test_an_exit_is_a_failure_too(workers: Workers, executor: str) -> None:
    bad, good = ticket(executor, leave), ticket(executor, double, 1)
    run(workers, [bad, good])
    assert good.result() == 2
    with pytest.raises(SystemExit):
        bad.result()


def test_a_timeout_concerns_one_ticket_and_names_its_term(workers: Workers, executor: str) -> None:
    run(workers, [ticket(executor, double, 0)])  # warm
    slow = Ticket("slow", executor, hang(executor), (), 0.2)
    good = ticket(executor, double, 4)
    began = time.monotonic()
    run(workers, [slow, good])
    assert time.monotonic() - began < 50.0  # idle it is 0.5; it would end by itself after 60
    assert good.result() == 8
    with pytest.raises(TermTimeoutError, match=r"'slow' must end within 0.2 s") as caught:
        slow.result()
    assert caught.value.term == "slow"
    # A thread cannot be stopped; a coroutine and a process can.
    assert slow.running == (executor == "thread")


def test_coroutines_are_not_limited(workers: Workers) -> None:
    gathered = 0
    all_here = asyncio.Event()

    async def meet() -> None:
        nonlocal gathered
        gathered += 1
        if gathered == 20:
            all_here.set()
        await all_here.wait()

    tickets = [Ticket(f"t{i}", "async", meet, (), 300.0) for i in range(20)]
    run(workers, tickets, width=1)
    for t in tickets:
        t.result()
