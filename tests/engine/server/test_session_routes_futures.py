from __future__ import annotations

import asyncio
import threading
from typing import Any

import tinker
from tinker import types

from steelyard.engine.server.app import RunningServer

from .training_requests import send
from .wire_client import Wire, until


def test_a_pending_result_is_a_408_after_the_poll_time(impatient: RunningServer) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        gate = threading.Event()
        impatient._state.runs[model].client._worker.submit(gate.wait)
        future = send(wire, model, 1)
        response = wire.post("retrieve_future", {"request_id": future["request_id"]})
        assert response.status_code == 408
        assert response.json() == {
            "type": "try_again",
            "request_id": future["request_id"],
            "queue_state": "active",
        }
        gate.set()
        assert wire.result(future).metrics


def test_a_cancelled_sampling_request_does_not_run(
    running: RunningServer, sdk: tinker.ServiceClient
) -> None:
    sampling = sdk.create_sampling_client(base_model="tiny-random")
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=2)
    gate = threading.Event()
    held = running._state.service._worker("tiny-random").submit(gate.wait)

    name = f"{sampling._sampling_session_id}:0"

    def future() -> Any:
        return running._state.futures.get(name)

    async def cancel_sampling() -> None:
        sampling_task = asyncio.ensure_future(sampling.sample_async(prompt, 1, params))
        await asyncio.to_thread(
            until, lambda: future() is not None and future().engine_future is not None
        )
        log = running._state.samplers.get(sampling._sampling_session_id).completions_of(0)
        await asyncio.to_thread(until, lambda: bool(log._added._waiters))  # the SDK waits for it
        work = future().engine_future
        sampling_task.cancel()
        await asyncio.to_thread(until, lambda: future().result is not None)
        assert work.cancelled()

    asyncio.run(cancel_sampling())
    gate.set()
    held.result()
    assert sampling.sample(prompt, 1, params).result().sequences[0].tokens


def test_completed_samples_are_reported_until_they_are_acknowledged(
    running: RunningServer, wire: Wire
) -> None:
    session = {"session_id": wire.session_id, "sampling_session_seq_id": 0}
    sampler_id = wire.ok("create_sampling_session", {**session, "base_model": "tiny-random"})[
        "sampling_session_id"
    ]
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    future = wire.ok("asample", body)
    assert future["sample_sequence_ids"] == [f"{sampler_id}:0:0"]
    poll = {"target": {"sampling_session_id": sampler_id}}
    first = wire.ok("retrieve_futures", poll)
    (completion,) = first["completions"]
    assert (completion["request_id"], completion["state"]) == (future["request_id"], "finished")
    assert first["cursor"] == 1
    assert wire.ok("retrieve_futures", poll) == first, "not acknowledged"
    assert running._state.futures.get(future["request_id"]) is not None
    wire.ok("asample", {**body, "seq_id": 1})
    acknowledged = {"prev_cursor": 1, "retrieved_request_ids": [future["request_id"], "other"]}
    second = wire.ok("retrieve_futures", {**poll, **acknowledged})
    assert [each["request_id"] for each in second["completions"]] == [f"{sampler_id}:1"]
    assert running._state.futures.get(future["request_id"]) is None


def test_training_requests_cannot_be_cancelled(wire: Wire, running: RunningServer) -> None:
    model = wire.model()
    gate = threading.Event()
    running._state.runs[model].client._worker.submit(gate.wait)
    future = send(wire, model, 1)
    wire.ok("cancel_future", {"request_id": future["request_id"]})
    wire.ok("cancel_future", {"request_id": "unknown"})
    gate.set()
    assert wire.result(future).metrics
