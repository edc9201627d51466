from __future__ import annotations

import asyncio
import threading
from typing import Any

import tinker
from tinker import types

from steelyard.engine.server.lifecycle import RunningServer

from .training_requests import send
from .wire_client import Wire, until


def test_a_pending_result_is_a_408_after_the_poll_time(impatient: RunningServer) -> None:
    with Wire(impatient.base_url) as wire:
        model = wire.model()
        gate = threading.Event()
        impatient._state.runs[model].client._host.later(gate.wait)
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
    held = running._state.service._host("tiny-random").later(gate.wait)

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
