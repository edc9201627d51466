from __future__ import annotations

import asyncio
import itertools
import threading
import time
from queue import SimpleQueue

import pytest

from steelyard.errors import TermTimeoutError
from steelyard.execution.executor import Batch, Cancelled, Executor, Ticket
from steelyard.execution.workers import Workers

from .every_executor import double, hang, run, ticket


def test_the_timeout_counts_from_the_start_not_from_the_queue(workers: Workers) -> None:
    first = Ticket("first", "thread", time.sleep, (3.2,), 300.0)
    second = ticket("thread", double, 1, timeout=3.0)
    run(workers, [first, second], width=1)
    assert second.result() == 2


def test_a_executor_is_no_wider_than_it_may_be(workers: Workers) -> None:
    lock, full = threading.Lock(), threading.Barrier(3)
    now, most = 0, 0

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        full.wait(timeout=600)
        with lock:
            now -= 1

    tickets = [ticket("thread", work) for _ in range(9)]
    run(workers, tickets, width=3)
    assert [t.result() for t in tickets] == [None] * 9, "three at once have met"
    assert most == 3


def test_in_turn_is_one_at_a_time_in_order(workers: Workers) -> None:
    executors: list[str] = ["thread", "async", "thread"]
    tickets = [ticket(executor, double, i) for i, executor in enumerate(executors)]
    assert run(workers, tickets, in_turn=True) == tickets
    for before, after in itertools.pairwise(tickets):
        assert before.ended is not None
        assert after.started is not None
        assert before.ended <= after.started


def test_leaving_the_block_calls_off_the_rest(workers: Workers, executor: str) -> None:
    running, queued = (Ticket(name, executor, hang(executor), (), 300.0) for name in ("r", "q"))
    quick = ticket(executor, double, 1)
    with Batch([quick, running, queued], workers.executors, 2) as batch:
        next(iter(batch.settled()))
    for t in (running, queued):
        assert t.settled
        with pytest.raises(Cancelled):
            t.result()


def test_another_thread_can_interrupt_the_wait(workers: Workers) -> None:
    events: SimpleQueue[Ticket | None] = SimpleQueue()
    slow = Ticket("slow", "async", hang("async"), (), 300.0)
    with Batch([slow], workers.executors, 2, events=events) as batch:
        events.put(None)
        with pytest.raises(Cancelled):
            list(batch.settled())


def test_starts_are_told_in_the_waiting_thread(workers: Workers, executor: str) -> None:
    told: list[tuple[str, threading.Thread]] = []
    tickets = [ticket(executor, double, i) for i in range(3)]
    run(workers, tickets, on_start=lambda t: told.append((t.term, threading.current_thread())))
    assert told == [("double", threading.current_thread())] * 3


def test_what_cannot_be_submitted_fails_its_ticket(workers: Workers) -> None:
    class Broken(Executor):
        def submit(self, ticket: Ticket) -> None:
            raise OSError("no more threads")

        def close(self) -> None: ...

    t = ticket("thread", double, 1)
    with Batch([t], {"thread": Broken()}, 2) as batch:
        list(batch.settled())
    with pytest.raises(OSError, match="no more threads"):
        t.result()


def test_an_interrupt_while_tickets_start_calls_off_those_that_run() -> None:
    class Interrupted(Executor):
        def submit(self, ticket: Ticket) -> None:
            if ticket.term == "second":
                raise KeyboardInterrupt
            ticket.start()

        def close(self) -> None: ...

    tickets = [Ticket(name, "mine", double, (1,)) for name in ("first", "second")]
    with pytest.raises(KeyboardInterrupt), Batch(tickets, {"mine": Interrupted()}, 2):
        pass
    for t in tickets:
        with pytest.raises(Cancelled):
            t.result()


def test_a_executor_may_have_a_width_of_its_own(workers: Workers) -> None:
    lock, now, most = threading.Lock(), [0], [0]

    async def work() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        await asyncio.sleep(0)
        with lock:
            now[0] -= 1

    executors = {"narrow": workers.executors["async"]}
    tickets = [Ticket("t", "narrow", work, (), 300.0) for _ in range(20)]
    with Batch(tickets, executors, 1, widths={"narrow": 3}) as batch:
        assert len(list(batch.settled())) == 20
    assert most[0] <= 3, "coroutines are not limited otherwise"


def test_deadlines_are_read_only_when_there_is_nothing_else_to_do() -> None:
    class Halves(Executor):
        """Ends half of the tickets when it is first asked for a deadline."""

        asked = 0

        def submit(self, ticket: Ticket) -> None:
            ticket.start()

        def deadline(self, ticket: Ticket) -> float:
            self.asked += 1
            if self.asked == 1:
                for each in tickets[:50]:
                    each.end(1)
            return time.monotonic() + 600

        def close(self) -> None: ...

    tickets = [Ticket("t", "mine", double, (1,), 600.0) for _ in range(100)]
    executor = Halves()
    with Batch(tickets, {"mine": executor}, 100) as batch:
        settled = list(itertools.islice(batch.settled(), 50))
    assert settled == tickets[:50]
    assert executor.asked <= 100, "for all tickets once, not at each of 150 events"


def test_messages_have_the_word_for_the_kind_of_term() -> None:
    t = Ticket("short", "thread", double, (1,), 1e-9, kind="reward")
    t.run()
    with pytest.raises(TermTimeoutError, match=r"^reward 'short' must end within 1e-09 s"):
        t.result()


def test_a_settled_ticket_lets_go_of_its_arguments() -> None:
    t = ticket("thread", double, 3)
    t.run()
    t.run()
    assert t.result() == 6
    assert t.args == ()
