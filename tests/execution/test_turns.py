"""Turns: one at a time, in order, also when a holder is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from steelyard.execution.executor import Ticket
from steelyard.execution.random_state import Turn, current_turn
from steelyard.execution.workers import Workers

from .tickets import run, wait_until


def held() -> Turn:
    turn = Turn()
    turn.take()
    return turn


def check_free() -> None:
    """Check that nobody holds a turn: else this would wait."""
    turn = Turn()
    thread = threading.Thread(target=turn.take)
    thread.start()
    wait_until(turn.granted.done)
    thread.join()
    turn.end()


def test_a_turn_waits_until_the_one_before_has_ended() -> None:
    first, second = held(), Turn()
    thread = threading.Thread(target=second.take)
    thread.start()
    assert second.since is None
    first.end()
    thread.join()
    assert second.since is not None
    second.end()


def test_turns_of_a_group_are_held_together_and_others_wait_for_all() -> None:
    group = object()
    one, two, other = Turn(group), Turn(group), Turn()
    one.take()
    two.take()
    thread = threading.Thread(target=other.take)
    thread.start()
    one.end()
    assert other.since is None
    two.end()
    thread.join()
    other.end()


def test_turns_of_different_groups_are_not_held_together() -> None:
    one, other = Turn(object()), Turn(object())
    one.take()
    thread = threading.Thread(target=other.take)
    thread.start()
    assert other.since is None
    one.end()
    thread.join()
    other.end()


def test_one_that_ends_while_it_waits_is_passed_over() -> None:
    first, gone, last = held(), Turn(), Turn()
    threads = [threading.Thread(target=each.take) for each in (gone, last)]
    for thread in threads:
        thread.start()
    gone.end()
    gone.end()
    threads[0].join()
    first.end()
    threads[1].join()
    assert (gone.since, last.since is None) == (None, False)
    last.end()


def test_one_that_has_ended_before_it_is_taken_is_not_held() -> None:
    turn = Turn()
    turn.end()
    turn.take()
    assert turn.since is None
    check_free()


def test_what_a_turn_has_changed_is_undone_when_it_ends() -> None:
    undone: list[str] = []
    turn = held()
    assert turn.change(lambda: undone.append("by itself"))
    assert turn.undo()
    assert not turn.undo()
    assert turn.change(lambda: undone.append("at the end"))
    turn.end()
    assert undone == ["by itself", "at the end"]
    assert not turn.undo()
    assert not turn.change(lambda: undone.append("too late"))


def test_turns_inside_of_a_turn_do_not_wait_for_it() -> None:
    outer = held()
    with outer.inside():
        assert current_turn() is outer
        inner = held()
        inner.end()
    assert current_turn() is None
    check_free()


def test_coroutines_wait_without_blocking_their_loop() -> None:
    first, second = held(), Turn()

    async def main() -> bool:
        task = asyncio.create_task(second.take_async())
        await asyncio.sleep(0)  # the loop goes on
        first.end()
        await task
        return second.since is not None

    assert asyncio.run(main())
    second.end()


def test_the_timeout_of_a_ticket_counts_from_its_turn() -> None:
    """It would be over before, if it counted from the submission."""
    first = held()
    released = threading.Timer(0.3, first.end)

    async def answer() -> int:
        return 1

    with Workers() as workers:
        tickets = [
            Ticket("t", "thread", lambda: 1, (), 0.2, turn=Turn()),
            Ticket("t", "async", answer, (), 0.2, turn=Turn()),
        ]
        released.start()
        run(workers, *tickets)
    assert [ticket.error for ticket in tickets] == [None, None]


@pytest.mark.parametrize("executor", ["thread", "async"])
def test_a_ticket_that_is_cancelled_while_it_waits_never_starts(executor: str) -> None:
    first, began = held(), threading.Event()

    async def begin() -> None:
        began.set()

    with Workers() as workers:
        ticket = Ticket(
            "t", executor, began.set if executor == "thread" else begin, (), turn=Turn()
        )
        workers.executors[executor].submit(ticket)
        ticket.cancel()
        first.end()
        check_free()
    assert not began.is_set()
    assert ticket.settled
