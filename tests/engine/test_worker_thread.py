from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tinker import types

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.engine.adapter import LoraSettings
from steelyard.engine.model import Model
from steelyard.engine.model_sources import find_model
from steelyard.engine.worker_thread import Arrivals, WorkerThread, completed
from steelyard.errors import ClosedError

from .data import SMALL, adapters, create, ragged, same, train

DATA = ragged(5, [6, 11])


def test_a_future_can_be_waited_for_and_awaited(client: LocalTrainingClient) -> None:
    data = ragged(0, [5])
    expected = client.forward(data, "cross_entropy").result(timeout=600).metrics

    async def ways() -> list[dict[str, float]]:
        future = client.forward(data, "cross_entropy")
        awaited = await client.forward(data, "cross_entropy")
        return [(await future.result_async(timeout=600)).metrics, awaited.metrics]

    assert asyncio.run(ways()) == [expected, expected]


def test_a_future_that_timed_out_can_be_waited_for_again(client: LocalTrainingClient) -> None:
    gate = threading.Event()
    client._worker.submit(gate.wait)
    future = client.forward(ragged(0, [5]), "cross_entropy")
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(timeout=0.01)
    gate.set()
    assert future.result(timeout=600).metrics["loss:sum"]


def test_calls_run_in_the_order_they_were_made(service: LocalServiceClient) -> None:
    waiting, eager = create(service), create(service)
    for step in range(4):
        waiting.forward_backward(ragged(step, [6, 3]), "cross_entropy").result()
        waiting.optim_step(SMALL).result()
    expected = waiting.forward(ragged(9, [6]), "cross_entropy").result().metrics
    gate = threading.Event()
    eager._worker.submit(gate.wait)
    for step in range(4):
        eager.forward_backward(ragged(step, [6, 3]), "cross_entropy")
        eager.optim_step(SMALL)
    last = eager.forward(ragged(9, [6]), "cross_entropy")
    gate.set()
    assert last.result().metrics == expected
    assert same(eager.weights(), waiting.weights())


def test_adapters_of_collected_sampling_clients_are_removed(alone: LocalServiceClient) -> None:
    client = create(alone)
    train(client)
    before = adapters(client)
    clients = [client.save_weights_and_get_sampling_client() for _ in range(3)]
    path = client.save_weights_for_sampler("s").result().path
    clients.append(alone.create_sampling_client(model_path=path))
    assert adapters(client) == before + 4
    del clients
    gc.collect()
    expected = client.weights()  # after whatever was queued
    assert adapters(client) == before
    train(client)
    assert not same(client.weights(), expected)


def test_adapters_of_collected_training_clients_are_removed(alone: LocalServiceClient) -> None:
    kept = create(alone)
    dropped = create(alone, seed=1)
    train(dropped)
    opened = dropped.open_pass(DATA)
    del dropped
    gc.collect()
    kept.weights()
    assert adapters(kept) == 2  # a pass that is open holds on to its adapter
    opened.backward([torch.ones(6), torch.ones(11)]).result()
    del opened
    gc.collect()
    kept.weights()
    assert adapters(kept) == 1
    train(kept)


def test_a_client_may_be_collected_while_the_executor_holds_its_lock(
    alone: LocalServiceClient,
) -> None:
    client = create(alone)
    held = [client.save_weights_and_get_sampling_client()]

    def drop() -> None:
        # As the garbage collector may, in the midst of handing over a call.
        with client._worker._thread._shutdown_lock:
            held.clear()
            gc.collect()

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    thread.join(600)
    assert not thread.is_alive()
    client.weights()
    assert adapters(client) == 1


def test_a_queued_sample_outlives_its_client(alone: LocalServiceClient) -> None:
    client = create(alone)
    train(client)
    sampling = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    expected = sampling.compute_logprobs(prompt).result()
    client.forward(ragged(1, [400] * 4), "cross_entropy")
    future = sampling.compute_logprobs(prompt)
    del sampling
    gc.collect()
    assert future.result() == expected


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    model = Model(find_model("tiny-random"), torch.device("cpu"), torch.float32)
    worker = WorkerThread(model, max_tokens=100)
    yield worker
    worker.close()


def test_submitted_calls_run_on_one_thread_in_order(worker: WorkerThread) -> None:
    calls: list[tuple[int, str]] = []

    def call(number: int) -> int:
        calls.append((number, threading.current_thread().name))
        return number**2

    futures = [worker.submit(call, number) for number in range(20)]
    assert [future.result() for future in futures] == [number**2 for number in range(20)]
    assert [number for number, _ in calls] == list(range(20))
    (name,) = {name for _, name in calls}
    assert name.startswith("steelyard-engine")


def test_a_call_that_raises_does_not_stop_the_next(worker: WorkerThread) -> None:
    def fail() -> None:
        raise KeyError("mine")

    failed, fine = worker.submit(fail), worker.submit(len, [1, 2])
    with pytest.raises(KeyError, match="mine"):
        failed.result()
    assert fine.result() == 2


def test_closing_finishes_the_running_call_and_cancels_the_queued(worker: WorkerThread) -> None:
    began, gate = threading.Event(), threading.Event()

    def wait() -> str:
        began.set()
        gate.wait()
        return "finished"

    running, queued = worker.submit(wait), worker.submit(len, [])
    began.wait()
    closing = threading.Thread(target=worker.close)
    closing.start()
    with pytest.raises(concurrent.futures.CancelledError):
        queued.result()
    gate.set()
    closing.join()
    assert running.result() == "finished"
    with pytest.raises(ClosedError, match="the service must be open, got a closed one"):
        worker.submit(len, [])


def test_an_adapter_is_removed_before_the_call_after_its_owner(worker: WorkerThread) -> None:
    class Owner:
        pass

    model = worker.model
    kept, removed = (
        worker.submit(model.add_adapter, LoraSettings(rank=1, seed=seed)).result()
        for seed in (0, 1)
    )
    owner = Owner()
    worker.remove_with(owner, removed)
    assert worker.submit(lambda: set(model._adapters)).result() == {kept.name, removed.name}
    del owner
    gc.collect()
    assert model._adapters == {kept.name, removed.name}  # nothing happens outside of a call
    assert worker.submit(lambda: set(model._adapters)).result() == {kept.name}


def test_a_completed_future_has_its_value() -> None:
    future = completed([1])
    assert future.future().done()
    assert future.result(timeout=0) == [1]

    async def awaited() -> object:
        return await future

    assert asyncio.run(awaited()) == [1]


# Requests that share a batch


def queue_in_order(
    worker: WorkerThread, calls: str, run_batch: Callable[[Arrivals[str, str]], None]
) -> list[Future[Any]]:
    """Queue a request for each lower-case letter, of that key, and a call for each other."""
    gate = threading.Event()
    worker.submit(gate.wait)
    futures = [
        worker.submit_request(run_batch, letter, f"{letter}{index}")
        if letter.islower()
        else worker.submit(str, f"{letter}{index}").future()
        for index, letter in enumerate(calls)
    ]
    gate.set()
    return futures


@pytest.mark.parametrize(
    ("calls", "batches"),
    [
        ("aaa", ["a0 a1 a2"]),
        # All that wait for the same weights when a batch begins, past requests for others.
        ("abab", ["a0 a2", "b1 b3"]),
        # But never past a call of training.
        ("abTab", ["a0", "b1", "a3", "b4"]),
        ("TaaTTa", ["a1 a2", "a5"]),
    ],
)
def test_a_batch_takes_the_requests_that_wait(
    worker: WorkerThread, calls: str, batches: list[str]
) -> None:
    found = []

    def run_batch(arrivals: Arrivals[str, str]) -> None:
        taken = arrivals.take()
        found.append(" ".join(request for request, _ in taken))
        for request, future in taken:
            future.set_result(request)
        assert arrivals.take() == []

    futures = queue_in_order(worker, calls, run_batch)
    assert [future.result(600) for future in futures] == [
        f"{letter}{index}" for index, letter in enumerate(calls)
    ]
    assert found == batches


def test_a_running_batch_takes_requests_at_the_head_of_the_queue(worker: WorkerThread) -> None:
    found: list[list[str]] = []
    late: list[Future[Any]] = []

    def run_batch(arrivals: Arrivals[str, str]) -> None:
        for _ in range(3):
            taken = arrivals.take()
            found.append([request for request, _ in taken])
            if not late:
                late.extend(
                    worker.submit_request(run_batch, key, f"{key}{index}")
                    for index, key in enumerate("aaba")
                )
                late[1].cancel()
            for request, future in taken:
                future.set_result(request)

    worker.submit_request(run_batch, "a", "first").result(600)
    worker.submit(len, []).result(600)
    # A request for other weights ends the batch, though one for the same waits behind it.
    assert found == [["first"], ["a0"], [], ["b2"], [], [], ["a3"], [], []]
    assert late[1].cancelled()


def test_the_error_of_a_batch_is_that_of_its_requests_without_a_result(
    worker: WorkerThread,
) -> None:
    def run_batch(arrivals: Arrivals[str, str]) -> None:
        ((_, first), *_) = arrivals.take()
        first.set_result("fine")
        raise KeyError("mine")

    futures = queue_in_order(worker, "aaaT", run_batch)
    assert futures[0].result(600) == "fine"
    for future in futures[1:3]:
        with pytest.raises(KeyError, match="mine"):
            future.result(600)
    assert futures[3].result(600) == "T3"


def test_a_batch_that_fails_before_it_takes_a_request_leaves_none_without_an_error(
    worker: WorkerThread,
) -> None:
    def run_batch(_: Arrivals[str, str]) -> None:
        raise KeyError("mine")

    futures = queue_in_order(worker, "aaT", run_batch)
    for future in futures[:2]:
        with pytest.raises(KeyError, match="mine"):
            future.result(600)
    assert futures[2].result(600) == "T2"


def test_the_error_of_a_batch_does_not_keep_what_the_batch_held(worker: WorkerThread) -> None:
    class Cache:
        pass

    kept: list[weakref.ref[Cache]] = []

    def run_batch(arrivals: Arrivals[str, str]) -> None:
        cache = Cache()
        kept.append(weakref.ref(cache))
        arrivals.take()
        raise KeyError("mine")

    future = worker.submit_request(run_batch, "a", "first")
    assert isinstance(future.exception(600), KeyError)
    assert kept[0]() is None


def test_an_adapter_that_cannot_be_removed_fails_the_call_that_would_hang(
    worker: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("device lost")

    def run_batch(_: Arrivals[str, str]) -> None: ...

    monkeypatch.setattr(worker.model, "remove_adapter", fail)
    for submit in (
        lambda: worker.submit(len, []).future(),
        lambda: worker.submit_request(run_batch, "a", "first"),
    ):
        worker._unused.append(object())  # type: ignore[arg-type]  # any adapter
        with pytest.raises(RuntimeError, match="device lost"):
            submit().result(600)


def test_closing_beside_a_thread_that_takes_calls_is_no_race(worker: WorkerThread) -> None:
    """The other thread takes the last call between the look at the queue and the next one."""
    began, emptied, gate = threading.Event(), threading.Event(), threading.Event()

    class Emptied(deque[Any]):
        def __bool__(self) -> bool:
            there = len(self) > 0
            self.clear()
            return there

        def clear(self) -> None:
            super().clear()
            emptied.set()

    def wait() -> None:
        began.set()
        gate.wait()

    worker.submit(wait)
    queued = worker.submit(len, [])
    assert began.wait(600)
    worker._queue = Emptied(worker._queue)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        closing = pool.submit(worker.close)
        assert emptied.wait(600)
        gate.set()
        closing.result(600)
    with pytest.raises(concurrent.futures.CancelledError):
        queued.result(600)


def test_closing_finishes_a_running_batch_and_cancels_waiting_requests(
    worker: WorkerThread,
) -> None:
    began, gate = threading.Event(), threading.Event()

    def run_batch(arrivals: Arrivals[str, str]) -> None:
        ((_, first),) = arrivals.take()
        began.set()
        gate.wait()
        assert arrivals.take() == []
        first.set_result("done")

    running = worker.submit_request(run_batch, "a", "first")
    assert began.wait(600)
    waiting = worker.submit_request(run_batch, "a", "second")
    closing = threading.Thread(target=worker.close)
    closing.start()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(600)
    gate.set()
    closing.join(600)
    assert running.result(600) == "done"
    with pytest.raises(ClosedError):
        worker.submit_request(run_batch, "a", "third")
