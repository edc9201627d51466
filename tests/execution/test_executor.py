"""A new place to run terms is one class, and its entry among the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from steelyard.errors import TermTimeoutError
from steelyard.execution.executor import Batch, Executor, Ticket
from steelyard.execution.workers import Workers


class Waiting(Executor):
    """It runs its tickets once as many as it waits for have come, in the order of their names."""

    def __init__(self, count: int, *, limited: bool) -> None:
        self.limited = limited
        self.count = count
        self.tickets: list[Ticket] = []
        self.closed = False

    def submit(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        if len(self.tickets) == self.count:
            for each in sorted(self.tickets, key=lambda t: t.term):
                each.run()

    def close(self) -> None:
        self.closed = True


class Hopeless(Executor):
    """It never starts a ticket, and whoever waits gives up at once."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def submit(self, ticket: Ticket) -> None:
        ticket.stop = lambda: self.stopped.append(ticket.term)

    def deadline(self, ticket: Ticket) -> float | None:
        return ticket.submitted

    def close(self) -> None: ...


def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(processes=1) as workers:
        yield workers


def run(workers: Workers, tickets: list[Ticket], width: int, **options: Any) -> list[Ticket]:
    with Batch(tickets, workers.executors, width, **options) as batch:
        return list(batch.settled())


def test_tickets_run_where_their_executor_says() -> None:
    mine = Waiting(1, limited=True)
    with Workers(processes=1) as workers:
        workers._executors["mine"] = mine
        assert workers.executors["mine"] is mine
        here, there = Ticket("a", "mine", double, (1,)), Ticket("b", "thread", double, (2,))
        run(workers, [here, there], 1)
        assert (here.result(), there.result()) == (2, 4)
        assert mine.tickets == [here]
    assert mine.closed


def test_an_executor_without_a_limit_gets_all_tickets_at_once(workers: Workers) -> None:
    workers._executors["mine"] = Waiting(3, limited=False)
    tickets = [Ticket(name, "mine", double, (i,)) for i, name in enumerate("cab")]
    assert [t.term for t in run(workers, tickets, 1)] == ["a", "b", "c"]
    assert [t.result() for t in tickets] == [0, 2, 4]


def test_a_limit_counts_for_each_executor(workers: Workers) -> None:
    mine = workers._executors["mine"] = Waiting(2, limited=True)
    tickets = [Ticket(name, "mine", double, (1,), 5.0) for name in "ba"]
    with Batch(tickets, workers.executors, 1):
        assert mine.tickets == tickets[:1]  # it waits for a second, which has no place
        assert not any(t.settled for t in tickets)
    mine.tickets.clear()
    tickets = [Ticket(name, "mine", double, (1,), 5.0) for name in "ba"]
    assert [t.term for t in run(workers, tickets, 2)] == ["a", "b"]


def test_an_executor_says_when_to_give_up(workers: Workers) -> None:
    mine = workers._executors["mine"] = Hopeless()
    late, fine = Ticket("late", "mine", double, (1,), 9.0), Ticket("fine", "thread", double, (1,))
    run(workers, [late, fine], 2)
    assert fine.result() == 2
    assert mine.stopped == ["late"]
    with pytest.raises(TermTimeoutError, match="'late' must end within 9 s"):
        late.result()


def test_an_executor_that_says_nothing_ends_tickets_itself() -> None:
    executor = Waiting(1, limited=True)
    ticket = Ticket("t", "mine", double, (1,), 1e-9)
    assert executor.deadline(ticket) is None
    assert (executor.awaits, Executor.limited) == (False, True)
    executor.prepare("t", double)  # by default there is nothing to prepare, nor to abandon
    executor.abandon()
    assert not ticket.settled
