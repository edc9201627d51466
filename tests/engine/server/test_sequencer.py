"""Requests out of order, lost, repeated and wrong: each is done once, in its place."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard.engine import LocalServiceClient
from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import SMALL, datum, ragged

from .wire_client import Wire, encoded, start, until

STEPS = 4
BAD = [datum([1, 2], [1, 512])]


@pytest.fixture(scope="module")
def reference(local: LocalServiceClient) -> list[float]:
    """The losses of a few steps, in order."""
    client = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    losses = []
    for step in range(STEPS):
        output = client.forward_backward(ragged(step, [4, 3]), "cross_entropy").result()
        client.optim_step(SMALL).result()
        losses.append(output.metrics["loss:sum"])
    return losses


def send(wire: Wire, model: str, number: int) -> dict[str, str]:
    """The odd numbers are batches, the even ones steps."""
    step = (number - 1) // 2
    if number % 2:
        response = wire.batch(model, number, ragged(step, [4, 3]))
    else:
        response = wire.step(model, number)
    assert response.status_code == 200, response.text
    promised: dict[str, str] = response.json()
    return promised


def losses_of(wire: Wire, promised: dict[int, dict[str, str]]) -> list[float]:
    return [
        wire.answer(promised[number]).metrics["loss:sum"] for number in range(1, 2 * STEPS + 1, 2)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_requests_out_of_order_are_done_in_order(
    wire: Wire, reference: list[float], seed: int
) -> None:
    model = wire.model()
    numbers = list(range(1, 2 * STEPS + 1))
    random.Random(seed).shuffle(numbers)
    promised = {number: send(wire, model, number) for number in numbers}
    assert losses_of(wire, promised) == pytest.approx(reference, abs=1e-5)


def test_the_same_request_five_times_is_done_once(wire: Wire, reference: list[float]) -> None:
    model = wire.model()
    promised = {}
    for number in range(1, 2 * STEPS + 1):
        answers = [send(wire, model, number) for _ in range(5)]
        assert all(answer == answers[0] for answer in answers)
        promised[number] = answers[0]
        if number % 3 == 0:  # also when it has been answered
            wire.answer(answers[0])
            assert send(wire, model, number) == answers[0]
    assert losses_of(wire, promised) == pytest.approx(reference, abs=1e-5)
    assert losses_of(wire, promised) == pytest.approx(reference, abs=1e-5), "fetched twice"


def test_the_same_request_five_times_at_once_is_done_once(
    running: RunningServer, wire: Wire, reference: list[float]
) -> None:
    model = wire.model()
    promised: dict[int, dict[str, str]] = {}

    def send_all(order: list[int]) -> None:
        with Wire(running.base_url) as own:
            for number in order:
                promised[number] = send(own, model, number)

    numbers = list(range(1, 2 * STEPS + 1))
    threads = [
        threading.Thread(target=send_all, args=(random.Random(i).sample(numbers, len(numbers)),))
        for i in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses_of(wire, promised) == pytest.approx(reference, abs=1e-5)


def test_a_model_made_twice_is_one(wire: Wire, running: RunningServer) -> None:
    model = wire.model()
    send(wire, model, 1)
    asked = {
        "session_id": wire.session_id,
        "model_seq_id": 0,
        "base_model": "tiny-random",
        "lora_config": {"rank": 4, "seed": 0},
    }
    before = running._state.runs[model]
    assert wire.answer(wire.ok("create_model", asked))["model_id"] == model
    assert running._state.runs[model] is before


def test_a_request_that_is_turned_away_keeps_nobody_waiting(
    wire: Wire, reference: list[float]
) -> None:
    model = wire.model()
    behind = send_later(wire, model, 2)
    refused = wire.batch(model, 1, BAD)
    assert refused.status_code == 400
    assert "must hold tokens from 0 to 511" in refused.json()["detail"]
    assert "metrics" in wire.answer(behind)
    again = wire.batch(model, 1, BAD)
    assert (again.status_code, again.json()) == (400, refused.json()), "and again"
    output = wire.answer(wire.batch(model, 3, ragged(0, [4, 3])).json())
    assert output.metrics["loss:sum"] == pytest.approx(reference[0], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("optim_step", {"adam_params": {"learning_rate": None}}),
        ("optim_step", {"adam_params": {"learning_rate": -1}}),
        ("save_weights", {"path": 3}),
        ("save_weights", {"path": "../x"}),
        ("save_weights_for_sampler", {"path": "a/b"}),
        ("save_weights_for_sampler", {"more": 1}),
        ("load_weights", {"path": "/etc", "optimizer": False}),
        ("load_weights", {"path": "tinker://x", "optimizer": "maybe"}),
        ("load_weights", {"path": "tinker://x", "optimizer": False, "weights_access_token": "x"}),
    ],
)
def test_no_request_that_is_turned_away_keeps_others_waiting(
    wire: Wire, path: str, body: dict[str, Any]
) -> None:
    model = wire.model()
    behind = send_later(wire, model, 2)
    for _ in range(2):
        refused = wire.post(path, {"model_id": model, "seq_id": 1, **body})
        assert refused.status_code == 400, refused.text
    assert "metrics" in wire.answer(behind)


def send_later(wire: Wire, model: str, number: int) -> dict[str, str]:
    promised: dict[str, str] = wire.step(model, number, rate=0.0).json()
    return promised


def test_a_number_stands_for_one_request(wire: Wire) -> None:
    model = wire.model()
    wire.answer(send(wire, model, 1))
    other = wire.step(model, 1)
    assert other.status_code == 400
    assert "seq_id must be used once, and 1 was a forward_backward" in other.json()["detail"]
    assert wire.step(model, 0).status_code == 400
    assert wire.batch(model, -3, ragged(0, [2])).status_code == 400
    far = wire.step(model, 5000)
    assert far.status_code == 403
    assert "at most 1024 requests of a model may wait" in far.json()["detail"]


def test_a_request_without_a_number_comes_next(wire: Wire) -> None:
    model = wire.model()
    send(wire, model, 1)
    asked = {"model_id": model, "adam_params": {"learning_rate": 0.1}}
    assert "metrics" in wire.answer(wire.ok("optim_step", asked))
    assert "metrics" in wire.answer(wire.ok("optim_step", asked))
    assert wire.step(model, 4).status_code == 200


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("impatient")
    with start(folder, gap_seconds=0.2, keep_seconds=0.2, poll_seconds=0.05) as running:
        yield running


def test_what_waits_for_a_request_that_never_comes_fails(
    impatient: RunningServer, reference: list[float]
) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        waiting = [wire.step(model, number).json() for number in (2, 4)]
        for promised in waiting:
            failed = wire.answer(promised)
            assert failed["category"] == "user"
            assert "seq_id 1 of" in failed["error"]
        output = wire.answer(wire.batch(model, 5, ragged(0, [4, 3])).json())
        assert output.metrics["loss:sum"] == pytest.approx(reference[0], abs=1e-5)
        assert wire.step(model, 3).status_code == 400, "its time is over"


def test_an_answer_is_kept_for_a_while_once_it_was_fetched(impatient: RunningServer) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        promised = send(wire, model, 1)
        wire.answer(promised)
        until(lambda: impatient._state.futures.get(promised["request_id"]) is None)
        gone = wire.post("retrieve_future", {"request_id": promised["request_id"]})
        assert gone.status_code == 404
        repeated = wire.batch(model, 1, ragged(0, [4, 3]))
        assert repeated.status_code == 400, "not done again"
        assert "got 1, which has been" in repeated.json()["detail"]


def test_what_was_turned_away_is_not_kept(impatient: RunningServer) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        assert wire.batch(model, 1, BAD).status_code == 400
        name = f"{model}:1"
        future = impatient._state.futures.get(name)
        assert future is None or future.rejection == (
            400,
            wire.batch(model, 1, BAD).json()["detail"],
        )
        until(lambda: impatient._state.futures.get(name) is None)
        assert wire.batch(model, 1, BAD).status_code == 400


def test_an_answer_that_is_not_there_is_waited_for(impatient: RunningServer) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        gate = threading.Event()
        impatient._state.runs[model].client._host.later(gate.wait)
        promised = send(wire, model, 1)
        response = wire.post("retrieve_future", {"request_id": promised["request_id"]})
        assert response.status_code == 408
        assert response.json() == {
            "type": "try_again",
            "request_id": promised["request_id"],
            "queue_state": "active",
        }
        gate.set()
        assert wire.answer(promised).metrics


def test_a_cut_connection_leaves_nothing_half_done(
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
    promised = {number: send(wire, model, number) for number in range(1, 2 * STEPS + 1)}
    assert losses_of(wire, promised) == pytest.approx(reference, abs=1e-5)


def test_the_folder_is_not_touched(folder: Path) -> None:
    assert not [entry for entry in folder.rglob(".*") if entry.suffix == ".link"]
