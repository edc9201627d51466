"""Several tasks at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from steelyard.experiment.compare.runs import run_together


def test_tasks_run_at_once_and_all_are_waited_for() -> None:
    together = threading.Barrier(3, timeout=600)
    ended: list[int] = []

    def task(number: int) -> Callable[[Callable[[], bool]], None]:
        def run(stop: Callable[[], bool]) -> None:
            together.wait()
            assert not stop()
            ended.append(number)

        return run

    run_together([task(number) for number in range(3)], 3, lambda: False)
    assert sorted(ended) == [0, 1, 2]


def test_a_failure_stops_the_others_and_starts_no_more() -> None:
    running = threading.Event()
    seen: list[str] = []

    def waits(stop: Callable[[], bool]) -> None:
        running.set()
        while not stop():
            pass
        seen.append("stopped")

    def fails(_: Callable[[], bool]) -> None:
        running.wait(600)
        raise ValueError("broken")

    def never(_: Callable[[], bool]) -> None:
        seen.append("started")

    with pytest.raises(ValueError, match="broken"):
        run_together([waits, fails, never], 2, lambda: False)
    assert seen == ["stopped"]


def test_nothing_starts_after_a_stop() -> None:
    run_together([lambda _: pytest.fail("started")], 1, lambda: True)
