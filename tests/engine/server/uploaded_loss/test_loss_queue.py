"""The order in which the passes of uploaded losses run."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest

from steelyard.engine.server.uploaded_loss.loss_process import MAX_PROCESSES
from steelyard.engine.server.uploaded_loss.loss_queue import LossQueue


@pytest.fixture
def queue() -> Iterator[LossQueue]:
    opened = LossQueue()
    yield opened
    opened.close()


class Gated:
    """A pass that begins, becomes slow if it shall, and ends when the test lets it."""

    def __init__(self, *, slow: bool = False) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._is_slow = slow

    def __call__(self, end_turn: Callable[[], object]) -> str:
        if self._is_slow:
            end_turn()
        self.begun.set()
        assert self.go.wait(600)
        return "done"


def test_passes_run_one_at_a_time_in_the_order_of_their_requests(queue: LossQueue) -> None:
    order: list[int] = []
    running = threading.Semaphore()

    def run(number: int) -> int:
        assert running.acquire(blocking=False)
        order.append(number)
        running.release()
        return number

    futures = [queue.submit(n % 3, lambda _, n=n: run(n)) for n in range(12)]  # type: ignore[misc]
    assert [future.result(600) for future in futures] == list(range(12))
    for client in range(3):
        assert [n for n in order if n % 3 == client] == list(range(client, 12, 3))


def test_a_pass_waits_for_one_that_is_not_slow(queue: LossQueue) -> None:
    first = Gated()
    one = queue.submit("a", first)
    assert first.begun.wait(600)
    second = Gated()
    other = queue.submit("b", second)
    assert not second.begun.wait(0.2)
    first.go.set()
    assert one.result(600) == "done"
    assert second.begun.wait(600)
    second.go.set()
    assert other.result(600) == "done"


def test_a_slow_pass_delays_its_own_client_alone(queue: LossQueue) -> None:
    slow, own = Gated(slow=True), Gated()
    first, second = queue.submit("a", slow), queue.submit("a", own)
    assert slow.begun.wait(600)
    for _ in range(5):
        assert queue.submit("b", lambda _: 7).result(600) == 7
    assert not own.begun.is_set()
    slow.go.set()
    own.go.set()
    assert [first.result(600), second.result(600)] == ["done"] * 2


def test_as_many_slow_passes_as_processes_run_at_once(queue: LossQueue) -> None:
    slow = [Gated(slow=True) for _ in range(MAX_PROCESSES)]
    futures: list[Future[str]] = [queue.submit(n, gated) for n, gated in enumerate(slow)]
    assert all(gated.begun.wait(600) for gated in slow)
    last = queue.submit("other", lambda _: "done")
    slow[1].go.set()
    assert last.result(600) == "done"
    for gated in slow:
        gated.go.set()
    assert [future.result(600) for future in futures] == ["done"] * MAX_PROCESSES


def test_an_error_belongs_to_its_pass(queue: LossQueue) -> None:
    def fail(_: object) -> None:
        raise ValueError("no")

    failed = queue.submit("a", fail)
    assert queue.submit("a", lambda _: 1).result(600) == 1
    with pytest.raises(ValueError, match="no"):
        failed.result(600)


def test_closing_ends_what_runs_and_cancels_the_rest() -> None:
    queue, first = LossQueue(), Gated()
    running = queue.submit("a", first)
    assert first.begun.wait(600)
    waiting = [queue.submit(client, lambda _: 1) for client in ("a", "b", "b")]
    closing = threading.Thread(target=queue.close)
    closing.start()
    for future in waiting:
        with pytest.raises(CancelledError):
            future.result(600)
    first.go.set()
    closing.join()
    assert running.result(600) == "done"


def test_a_pass_that_fails_keeps_nothing_of_the_model_alive(queue: LossQueue) -> None:
    class Graph:
        pass

    graphs: list[weakref.ref[Graph]] = []

    def fail(_: object) -> None:
        graph = Graph()
        graphs.append(weakref.ref(graph))
        raise ValueError("a loss")

    gc.disable()  # which would free cycles sooner or later
    try:
        future = queue.submit("a", fail)
        assert isinstance(future.exception(600), ValueError)
        del future
        assert queue.submit("a", lambda _: 7).result(600) == 7
        assert graphs[0]() is None
    finally:
        gc.enable()
