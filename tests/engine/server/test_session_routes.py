from __future__ import annotations

import threading
from typing import Any

import pytest
import tinker

from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import ragged

from .wire_client import Wire


def test_closing_a_client_unloads_its_models(running: RunningServer) -> None:
    with tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service:
        training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        sampling = training.save_weights_and_get_sampling_client()
        assert training.model_id in running._state.runs
    assert training.model_id not in running._state.runs
    assert sampling._sampling_session_id not in running._state.samplers


def test_heartbeats_are_answered_while_a_model_runs(wire: Wire, running: RunningServer) -> None:
    model = wire.model()
    gate = threading.Event()
    running._state.runs[model].client._host.later(gate.wait)
    future = wire.step(model, 1).json()
    for _ in range(20):
        wire.ok("session_heartbeat", {"session_id": wire.session_id})
    future = running._state.futures.get(future["request_id"])
    assert future is not None
    assert future.result is None
    gate.set()
    wire.result(future)


def total(logprobs: Any) -> Any:
    return logprobs.sum(), {}


def test_an_uploaded_loss_belongs_to_its_session(sdk: tinker.ServiceClient, running: Any) -> None:
    handle = sdk.create_custom_loss(total, {"logprobs": 1}).result()
    with tinker.ServiceClient(base_url=running.base_url, api_key="tml-other") as other:
        training = other.create_lora_training_client("tiny-random", rank=2, seed=0)
        with pytest.raises(tinker.BadRequestError, match="a loss this client has uploaded"):
            training.forward_backward(
                ragged(0, [3]), "custom", {"loss_id": handle.loss_id or ""}
            ).result()
        with pytest.raises(tinker.BadRequestError, match="is for forward_backward"):
            training.forward(ragged(0, [3]), "custom", {"loss_id": handle.loss_id or ""}).result()
