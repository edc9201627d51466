from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from steelyard.engine import LocalServiceClient
from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.futures import Sequencer, ServerFuture
from steelyard.engine.server.http_messages import EncodedResult
from steelyard.engine.server.state import (
    BaseModels,
    ServerSettings,
    ServerState,
    TrainingRun,
    start_call,
)
from steelyard.errors import InputError
from tests.engine.data import ragged

from .training_requests import STEPS, losses_of, send
from .wire_client import Wire, encoded


def test_a_broken_connection_leaves_no_request_half_queued(
    running: RunningServer, wire: Wire, reference: list[float]
) -> None:
    model = wire.model()
    body = encoded(model, 1, ragged(0, [4, 3]))
    host, port = running.base_url.removeprefix("http://").split(":")
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    for sent in (head, head + body[: len(body) // 2], head + body):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    futures = {seq_id: send(wire, model, seq_id) for seq_id in range(1, 2 * STEPS + 1)}
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ServerState]:
    """State of a server with one session `s` and one model `m`."""
    with LocalServiceClient(checkpoint_dir=tmp_path) as service:
        state = ServerState(service, BaseModels({"tiny-random": 512}), ServerSettings(max_models=2))
        session = state.sessions.create(None, None)
        client = service.create_lora_training_client("tiny-random", rank=1, seed=0)
        sequencer = Sequencer("m", state.futures, 10)
        state.runs["m"] = TrainingRun("m", session.session_id, client, sequencer)
        yield state


def encode(value: int) -> EncodedResult:
    return EncodedResult(str(value).encode())


def call_of(engine: Future[int]) -> Callable[[], Callable[[], Future[int]]]:
    return lambda: lambda: engine


def test_a_submitted_request_is_settled_by_the_engine(state: ServerState) -> None:
    async def run() -> None:
        engine: Future[int] = Future()
        future = await state.submit(state.runs["m"], 1, "forward", call_of(engine), encode)
        again = await state.submit(
            state.runs["m"], 1, "forward", lambda: pytest.fail("validated twice"), encode
        )
        assert again is future
        engine.set_result(3)
        assert await future.wait(600) == EncodedResult(b"3")

    asyncio.run(run())


def test_a_rejected_request_does_not_block_later_ones(state: ServerState) -> None:
    def invalid() -> Callable[[], Future[int]]:
        raise InputError("not valid.")

    async def run() -> None:
        engine: Future[int] = Future()
        engine.set_result(5)
        later = await state.submit(state.runs["m"], 2, "forward", call_of(engine), encode)
        assert later.result is None
        with pytest.raises(InputError, match="not valid"):
            await state.submit(state.runs["m"], 1, "forward", invalid, encode)
        assert await later.wait(600) == EncodedResult(b"5")

    asyncio.run(run())


def test_a_request_is_queued_although_its_handler_is_cancelled(state: ServerState) -> None:
    async def run() -> None:
        engine: Future[int] = Future()
        engine.set_result(1)
        validating, proceed = threading.Event(), threading.Event()

        def validate() -> Callable[[], Future[int]]:
            validating.set()
            proceed.wait()
            return lambda: engine

        handler = asyncio.ensure_future(
            state.submit(state.runs["m"], 1, "forward", validate, encode)
        )
        await asyncio.to_thread(validating.wait)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        proceed.set()
        future = state.futures.get("m:1")
        assert future is not None
        assert await future.wait(600) == EncodedResult(b"1")

    asyncio.run(run())


def test_an_unknown_model_is_not_found(state: ServerState) -> None:
    assert state.get_run("m") is state.runs["m"]
    with pytest.raises(HTTPException, match="sends nothing for 300 seconds"):
        state.get_run("nobody")


def test_models_that_are_being_created_count_toward_the_limit(state: ServerState) -> None:
    state.check_model_limit("new")
    state.creating.add("other")
    state.check_model_limit("m")
    with pytest.raises(HTTPException, match="at most 2 models may be in training"):
        state.check_model_limit("new")


def test_unloading_cancels_the_requests_of_one_model(state: ServerState) -> None:
    mine = state.futures.create("m:1", "forward", "s")
    other = state.futures.create("m2:1", "forward", "s")
    state.unload("m", "unloaded.")
    assert state.runs == {}
    assert mine.result is not None
    assert b"unloaded." in mine.result.body
    assert other.result is None


def test_ending_a_session_removes_its_models_and_futures(state: ServerState) -> None:
    session_id = state.runs["m"].session_id
    mine = state.futures.create("m:1", "forward", session_id)
    other = state.futures.create("x:1", "forward", "other")
    state.end_session(session_id, "closed.")
    assert (state.runs, list(state.sessions), list(state.futures)) == ({}, [], [other])
    assert mine.result is not None
    assert mine.result.failed


def test_a_call_that_raises_settles_the_future() -> None:
    def broken() -> Future[int]:
        raise InputError("the model has changed.")

    future = ServerFuture("m:1", "forward", "s")
    start_call(future, broken, encode)
    assert future.result is not None
    assert b"the model has changed." in future.result.body


def test_a_cancelled_request_is_not_started() -> None:
    future = ServerFuture("m:1", "forward", "s")
    future.cancel("unloaded.")
    start_call(future, lambda: pytest.fail("started"), encode)
