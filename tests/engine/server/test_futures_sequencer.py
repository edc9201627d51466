from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.futures import Sequencer, ServerFutures
from steelyard.engine.server.http_messages import EncodedResult
from tests.engine.data import ragged

from .training_requests import BAD_BATCH, STEPS, losses_of, send, send_step
from .wire_client import Wire


@pytest.mark.parametrize("seed", range(3))
def test_requests_out_of_order_run_in_order(wire: Wire, reference: list[float], seed: int) -> None:
    model = wire.model()
    seq_ids = list(range(1, 2 * STEPS + 1))
    random.Random(seed).shuffle(seq_ids)
    futures = {seq_id: send(wire, model, seq_id) for seq_id in seq_ids}
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5)


def test_a_repeated_request_runs_once(wire: Wire, reference: list[float]) -> None:
    model = wire.model()
    futures = {}
    for seq_id in range(1, 2 * STEPS + 1):
        repeated = [send(wire, model, seq_id) for _ in range(5)]
        assert all(future == repeated[0] for future in repeated)
        futures[seq_id] = repeated[0]
        if seq_id % 3 == 0:  # also when its result was fetched
            wire.result(repeated[0])
            assert send(wire, model, seq_id) == repeated[0]
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5)
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5), "fetched twice"


def test_a_request_repeated_concurrently_runs_once(
    running: RunningServer, wire: Wire, reference: list[float]
) -> None:
    model = wire.model()
    futures: dict[int, dict[str, str]] = {}

    def send_all(order: list[int]) -> None:
        with Wire(running.base_url) as own:
            for seq_id in order:
                futures[seq_id] = send(own, model, seq_id)

    seq_ids = list(range(1, 2 * STEPS + 1))
    threads = [
        threading.Thread(target=send_all, args=(random.Random(i).sample(seq_ids, len(seq_ids)),))
        for i in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5)


def test_later_requests_do_not_wait_for_a_rejected_one(wire: Wire, reference: list[float]) -> None:
    model = wire.model()
    later = send_step(wire, model, 2)
    rejected = wire.batch(model, 1, BAD_BATCH)
    assert rejected.status_code == 400
    assert "must hold tokens from 0 to 511" in rejected.json()["detail"]
    assert "metrics" in wire.result(later)
    again = wire.batch(model, 1, BAD_BATCH)
    assert (again.status_code, again.json()) == (400, rejected.json()), "rejected again"
    output = wire.result(wire.batch(model, 3, ragged(0, [4, 3])).json())
    assert output.metrics["loss:sum"] == pytest.approx(reference[0], abs=1e-5)


def test_a_sequence_id_belongs_to_one_request(wire: Wire) -> None:
    model = wire.model()
    wire.result(send(wire, model, 1))
    other = wire.step(model, 1)
    assert other.status_code == 409
    assert "seq_id must be used once, and 1 was a forward_backward" in other.json()["detail"]
    assert wire.step(model, 0).status_code == 409, "0 is that of create_model"
    assert wire.batch(model, -3, ragged(0, [2])).status_code == 400
    far = wire.step(model, 5000)
    assert far.status_code == 403
    assert "at most 1024 requests of a model may wait" in far.json()["detail"]


def test_a_sequence_id_belongs_to_one_payload(wire: Wire) -> None:
    model = wire.model()
    first = send(wire, model, 1)
    other = wire.batch(model, 1, ragged(7, [5]))
    assert other.status_code == 409
    assert "1 was a forward_backward of" in other.json()["detail"]
    assert "got another one with other contents" in other.json()["detail"]
    assert other.headers["x-should-retry"] == "false"
    assert send(wire, model, 1) == first, "the same one is not another"
    step = wire.step(model, 2, rate=0.5).json()
    assert wire.step(model, 2, rate=0.25).status_code == 409
    assert wire.step(model, 2, rate=0.5).json() == step
    requests: list[tuple[str, dict[str, str | int]]] = [
        ("save_weights", {"path": "a"}),
        ("save_weights_for_sampler", {"path": "b"}),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 9}),
    ]
    for number, (path, body) in enumerate(requests, start=3):
        seq_id = {"model_id": model, "seq_id": number}
        wire.ok(path, {**seq_id, **body})
        changed = {key: f"{value}9" for key, value in body.items()}
        assert wire.post(path, {**seq_id, **changed}).status_code == 409


def test_a_request_without_a_sequence_id_comes_next(wire: Wire) -> None:
    model = wire.model()
    send(wire, model, 1)
    body = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
    assert "metrics" in wire.result(wire.ok("optim_step", body))
    assert "metrics" in wire.result(wire.ok("optim_step", body))
    assert wire.step(model, 4).status_code == 200


def test_requests_behind_a_missing_one_fail(
    impatient: RunningServer, reference: list[float]
) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        waiting = [wire.step(model, seq_id).json() for seq_id in (2, 4)]
        for future in waiting:
            failed = wire.result(future)
            assert failed["category"] == "user"
            assert "seq_id 1 of" in failed["error"]
        output = wire.result(wire.batch(model, 5, ragged(0, [4, 3])).json())
        assert output.metrics["loss:sum"] == pytest.approx(reference[0], abs=1e-5)
        assert wire.step(model, 3).status_code == 400, "the gap is closed"


def test_no_temporary_link_is_left_in_the_checkpoint_folder(folder: Path) -> None:
    assert not [entry for entry in folder.rglob(".*") if entry.suffix == ".link"]


@pytest.fixture
def futures() -> ServerFutures:
    return ServerFutures()


@pytest.fixture
def sequencer(futures: ServerFutures) -> Sequencer:
    return Sequencer("m", futures, max_waiting=10)


@given(order=st.permutations(range(1, 9)), skipped=st.sets(st.integers(1, 8)))
def test_ready_requests_start_in_the_order_of_their_ids(
    order: list[int], skipped: set[int]
) -> None:
    sequencer, started = Sequencer("m", ServerFutures(), 10), list[int]()
    arrived: set[int] = set()
    for seq_id in order:
        if seq_id in skipped:
            sequencer.skip(seq_id)
        else:
            sequencer.mark_ready(seq_id, lambda seq_id=seq_id: started.append(seq_id))  # type: ignore[misc]
        arrived.add(seq_id)
        complete = next(n for n in range(1, 10) if n not in arrived)
        assert started == [n for n in range(1, complete) if n not in skipped]


def test_a_request_that_returns_a_future_holds_the_later_ones(sequencer: Sequencer) -> None:
    async def run() -> None:
        first: Future[None] = Future()
        started: list[int] = []
        second = asyncio.Event()

        def start_second() -> None:
            started.append(2)
            second.set()

        sequencer.mark_ready(1, lambda: first)
        sequencer.mark_ready(2, start_second)
        sequencer.skip(3)
        sequencer.mark_ready(5, lambda: started.append(5))
        sequencer.fail_stalled(0)
        assert started == []
        first.set_result(None)
        await second.wait()
        sequencer.mark_ready(4, lambda: started.append(4))
        assert started == [2, 4, 5]

    asyncio.run(run())


def test_the_next_free_id_follows_all_that_have_arrived(sequencer: Sequencer) -> None:
    assert sequencer.next_free == 1
    sequencer.create_future(1, "forward", "s")
    assert sequencer.next_free == 2, "1 is being validated"
    sequencer.mark_ready(4, lambda: None)
    assert sequencer.next_free == 5


def test_a_repeated_request_is_found_and_another_one_rejected(sequencer: Sequencer) -> None:
    assert sequencer.find(1, "forward") is None
    future = sequencer.create_future(1, "forward", "s")
    assert future.request_id == "m:1"
    assert sequencer.find(1, "forward") is future
    with pytest.raises(HTTPException, match="1 was a forward of m, got a optim_step"):
        sequencer.find(1, "optim_step")


def test_ids_in_the_past_or_too_far_ahead_are_rejected(sequencer: Sequencer) -> None:
    sequencer.skip(1)
    with pytest.raises(HTTPException, match="must be 2 or more, the next of m, got 1") as past:
        sequencer.find(1, "forward")
    assert sequencer.find(11, "forward") is None
    with pytest.raises(HTTPException, match="must be less than 12") as ahead:
        sequencer.find(12, "forward")
    assert (past.value.status_code, ahead.value.status_code) == (400, 403)


def test_requests_fail_when_the_next_one_is_missing_for_too_long(
    sequencer: Sequencer, futures: ServerFutures
) -> None:
    waiting = sequencer.create_future(3, "forward", "s")
    sequencer.mark_ready(3, lambda: pytest.fail("started"))
    sequencer.fail_stalled(3600)
    assert waiting.result is None, "not yet"
    sequencer.fail_stalled(0)
    assert waiting.result is not None
    assert b"seq_id 1 of m has not come within 0 seconds" in waiting.result.body
    started: list[int] = []
    sequencer.mark_ready(4, lambda: started.append(4))
    assert started == [4], "the gap is closed"


def test_a_request_that_is_being_validated_is_not_missing(
    sequencer: Sequencer, futures: ServerFutures
) -> None:
    sequencer.create_future(1, "forward", "s")
    waiting = sequencer.create_future(2, "forward", "s")
    sequencer.mark_ready(2, lambda: waiting.settle(EncodedResult(b"done")))
    sequencer.fail_stalled(0)
    assert waiting.result is None
    sequencer.mark_ready(1, lambda: None)
    assert waiting.result == EncodedResult(b"done")


def test_a_request_that_was_validated_while_those_around_it_failed_fails_too(
    sequencer: Sequencer, futures: ServerFutures
) -> None:
    late, rejected, waiting = (sequencer.create_future(n, "forward", "s") for n in (2, 3, 4))
    sequencer.mark_ready(4, lambda: pytest.fail("started"))
    sequencer.fail_stalled(0)
    assert waiting.result is not None
    sequencer.skip(3)
    assert rejected.result is None, "its own error is reported elsewhere"
    sequencer.mark_ready(2, lambda: pytest.fail("started"))
    assert late.result is not None
    assert b"a request before seq_id 2 of m is missing, so" in late.result.body
    sequencer.fail_stalled(0)
    started: list[int] = []
    sequencer.mark_ready(5, lambda: started.append(5))
    assert started == [5], "the gap stays closed"
