from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import ragged

from .training_requests import BAD_BATCH, STEPS, losses_of, send, send_step
from .wire_client import Wire


@pytest.mark.parametrize("seed", range(3))
def test_requests_out_of_order_run_in_order(wire: Wire, reference: list[float], seed: int) -> None:
    model = wire.model()
    numbers = list(range(1, 2 * STEPS + 1))
    random.Random(seed).shuffle(numbers)
    futures = {number: send(wire, model, number) for number in numbers}
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5)


def test_a_repeated_request_runs_once(wire: Wire, reference: list[float]) -> None:
    model = wire.model()
    futures = {}
    for number in range(1, 2 * STEPS + 1):
        answers = [send(wire, model, number) for _ in range(5)]
        assert all(answer == answers[0] for answer in answers)
        futures[number] = answers[0]
        if number % 3 == 0:  # also when it has been answered
            wire.result(answers[0])
            assert send(wire, model, number) == answers[0]
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5)
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5), "fetched twice"


def test_a_request_repeated_concurrently_runs_once(
    running: RunningServer, wire: Wire, reference: list[float]
) -> None:
    model = wire.model()
    futures: dict[int, dict[str, str]] = {}

    def send_all(order: list[int]) -> None:
        with Wire(running.base_url) as own:
            for number in order:
                futures[number] = send(own, model, number)

    numbers = list(range(1, 2 * STEPS + 1))
    threads = [
        threading.Thread(target=send_all, args=(random.Random(i).sample(numbers, len(numbers)),))
        for i in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5)


def test_later_requests_do_not_wait_for_a_rejected_one(wire: Wire, reference: list[float]) -> None:
    model = wire.model()
    behind = send_step(wire, model, 2)
    rejected = wire.batch(model, 1, BAD_BATCH)
    assert rejected.status_code == 400
    assert "must hold tokens from 0 to 511" in rejected.json()["detail"]
    assert "metrics" in wire.result(behind)
    again = wire.batch(model, 1, BAD_BATCH)
    assert (again.status_code, again.json()) == (400, rejected.json()), "and again"
    output = wire.result(wire.batch(model, 3, ragged(0, [4, 3])).json())
    assert output.metrics["loss:sum"] == pytest.approx(reference[0], abs=1e-5)


def test_a_sequence_id_belongs_to_one_request(wire: Wire) -> None:
    model = wire.model()
    wire.result(send(wire, model, 1))
    other = wire.step(model, 1)
    assert other.status_code == 400
    assert "seq_id must be used once, and 1 was a forward_backward" in other.json()["detail"]
    assert wire.step(model, 0).status_code == 400
    assert wire.batch(model, -3, ragged(0, [2])).status_code == 400
    far = wire.step(model, 5000)
    assert far.status_code == 403
    assert "at most 1024 requests of a model may wait" in far.json()["detail"]


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
        waiting = [wire.step(model, number).json() for number in (2, 4)]
        for futures in waiting:
            failed = wire.result(futures)
            assert failed["category"] == "user"
            assert "seq_id 1 of" in failed["error"]
        output = wire.result(wire.batch(model, 5, ragged(0, [4, 3])).json())
        assert output.metrics["loss:sum"] == pytest.approx(reference[0], abs=1e-5)
        assert wire.step(model, 3).status_code == 400, "its time is over"


def test_no_temporary_link_is_left_in_the_checkpoint_folder(folder: Path) -> None:
    assert not [entry for entry in folder.rglob(".*") if entry.suffix == ".link"]
