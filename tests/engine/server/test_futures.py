from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import Future
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.futures import ServerFuture, ServerFutures
from steelyard.engine.server.http_messages import EncodedResult
from steelyard.errors import CheckpointError, ClosedError, InputError
from tests.engine.data import ragged

from .training_requests import BAD_BATCH, send
from .wire_client import Wire, until


def test_a_fetched_result_is_dropped_after_a_while(impatient: RunningServer) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        future = send(wire, model, 1)
        wire.result(future)
        until(lambda: impatient._state.futures.get(future["request_id"]) is None)
        gone = wire.post("retrieve_future", {"request_id": future["request_id"]})
        assert gone.status_code == 404
        repeated = wire.batch(model, 1, ragged(0, [4, 3]))
        assert repeated.status_code == 400, "not done again"
        assert "got 1, which has been" in repeated.json()["detail"]


def test_a_rejected_request_is_dropped_after_a_while(impatient: RunningServer) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        assert wire.batch(model, 1, BAD_BATCH).status_code == 400
        name = f"{model}:1"
        future = impatient._state.futures.get(name)
        assert future is None or future.rejection == (
            400,
            wire.batch(model, 1, BAD_BATCH).json()["detail"],
        )
        until(lambda: impatient._state.futures.get(name) is None)
        assert wire.batch(model, 1, BAD_BATCH).status_code == 400


def make(name: str = "m:1") -> ServerFuture:
    return ServerFuture(name, "optim_step", "s")


def body_of(future: ServerFuture) -> dict[str, Any]:
    assert future.result is not None
    body: dict[str, Any] = json.loads(future.result.body)
    return body


def test_the_first_result_counts_and_callbacks_run_once() -> None:
    future, called = make(), list[ServerFuture]()
    future.add_done_callback(called.append)
    future.settle(EncodedResult(b"first"))
    future.settle(EncodedResult(b"second"))
    assert future.result == EncodedResult(b"first")
    assert called == [future]


def test_a_future_is_settled_with_the_value_of_the_engine() -> None:
    order: list[str] = []

    async def run() -> EncodedResult | None:
        future, engine = make(), Future[int]()
        future.add_done_callback(lambda _: order.append("settled"))
        future.settle_from(
            engine, lambda value: EncodedResult(str(value).encode()), lambda v: order.append(str(v))
        )
        assert future.engine_future is engine
        engine.set_result(7)
        result = await future.wait(600)
        assert future.engine_future is None, "it would keep the model alive"
        assert future.fetched_at is not None
        return result

    assert asyncio.run(run()) == EncodedResult(b"7")
    assert order == ["7", "settled"]


@pytest.mark.parametrize(
    ("error", "category", "status", "message"),
    [
        (InputError("rank must be 1."), "user", 400, "rank must be 1."),
        (CheckpointError("is none."), "user", 400, "is none."),
        (ClosedError("closed."), "server", 500, "the server is stopping."),
        (OSError("disk\nfull"), "server", 500, "the engine failed: OSError: disk full."),
    ],
)
def test_an_error_of_the_engine_becomes_a_failed_result(
    error: Exception, category: str, status: int, message: str
) -> None:
    async def run() -> dict[str, Any]:
        future, engine = make(), Future[int]()
        future.settle_from(
            engine, lambda _: pytest.fail("encoded"), lambda _: pytest.fail("called")
        )
        engine.set_exception(error)
        await future.wait(600)
        return body_of(future)

    assert asyncio.run(run()) == {"error": message, "category": category, "status": status}


def test_a_call_that_the_engine_cancels_as_it_closes_fails_as_one_of_a_server_that_stops() -> None:
    async def run() -> dict[str, Any]:
        future, engine = make(), Future[int]()
        future.settle_from(engine, lambda _: pytest.fail("encoded"))
        engine.cancel()
        await future.wait(600)
        return body_of(future)

    stopping = {"error": "the server is stopping.", "category": "server", "status": 500}
    assert asyncio.run(run()) == stopping


def test_a_result_that_cannot_be_encoded_is_a_failure_of_the_engine() -> None:
    async def run() -> dict[str, Any]:
        future, engine = make(), Future[int]()
        future.settle_from(engine, lambda value: EncodedResult(bytes(value // 0)))
        engine.set_result(1)
        await future.wait(600)
        return body_of(future)

    assert asyncio.run(run())["error"].startswith("the engine failed: ZeroDivisionError")


def test_a_client_error_is_raised_now_and_when_the_request_is_sent_again() -> None:
    future = make()
    with pytest.raises(InputError, match="too large"):
        future.reject(InputError("too large."))
    assert future.rejection == (400, "too large.")
    with pytest.raises(HTTPException) as again:
        future.check_repeated(future.request_type, None)
    assert (again.value.status_code, again.value.detail) == (400, "too large.")
    assert body_of(future)["category"] == "user"


def test_any_other_error_is_reported_with_the_result_only() -> None:
    future = make()
    future.reject(RuntimeError("broken"))
    future.check_repeated(future.request_type, None)
    assert body_of(future)["error"] == "the engine failed: RuntimeError: broken."


def test_an_id_that_another_request_has_is_a_conflict() -> None:
    future = ServerFuture("m:7", "forward", "s", b"contents")
    future.check_repeated("forward", b"contents")
    for request_type, payload, got in (
        ("forward", b"others", "another one with other contents"),
        ("optim_step", b"contents", "a optim_step"),
    ):
        with pytest.raises(HTTPException) as error:
            future.check_repeated(request_type, payload)
        assert error.value.status_code == 409
        assert error.value.detail == (
            f"seq_id must be used once, and 7 was a forward of m, got {got}."
        )
        assert error.value.headers == {"x-should-retry": "false"}


def test_cancel_fails_a_queued_request_and_leaves_a_running_one() -> None:
    queued, running = make(), make()
    queued.engine_future, running.engine_future = Future(), Future()
    running.engine_future.set_running_or_notify_cancel()
    for future in (queued, running):
        future.cancel("the model was unloaded.")
    assert body_of(queued)["error"] == "the model was unloaded."
    assert running.result is None


def test_waiting_for_a_pending_result_ends_without_one() -> None:
    future = make()
    assert asyncio.run(future.wait(0.001)) is None
    assert future.fetched_at is None


def test_futures_are_found_by_their_request_id_until_they_are_dropped() -> None:
    futures = ServerFutures()
    first, second = futures.create("a", "forward", "s"), futures.create("b", "forward", "s")
    assert (futures.get("a"), futures.get("c"), len(futures)) == (first, None, 2)
    for future in (first, second):
        future.settle(EncodedResult(b""))
    first.fetched_at = -math.inf
    futures.drop_fetched(60)
    assert list(futures) == [second]


def test_at_the_limit_the_oldest_future_with_a_result_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steelyard.engine.server.futures._MAX_FUTURES", 3)
    futures = ServerFutures()
    pending, done, later = (futures.create(name, "forward", "s") for name in "abc")
    done.settle(EncodedResult(b""))
    later.settle(EncodedResult(b""))
    added = futures.create("d", "forward", "s")
    assert list(futures) == [pending, later, added]
