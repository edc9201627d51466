from __future__ import annotations

import threading
from typing import Any

import pytest
import tinker

from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import ragged

from .uploaded_loss.graphs import SUM, upload
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
    running._state.runs[model].client._worker.submit(gate.wait)
    future = wire.step(model, 1).json()
    for _ in range(20):
        wire.ok("session_heartbeat", {"session_id": wire.session_id})
    pending = running._state.futures.get(future["request_id"])
    assert pending is not None
    assert pending.result is None
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


def test_an_uploaded_loss_has_no_other_settings(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    handle = sdk.create_custom_loss(total, {"logprobs": 1}).result()
    config: dict[str, Any] = {"loss_id": handle.loss_id, "temperatur": 0.5}
    with pytest.raises(
        tinker.BadRequestError,
        match=r"a custom loss may hold \['loss_id', 'temperature'\], got the key 'temperatur'",
    ):
        training.forward_backward(ragged(0, [3]), "custom", config).result()
    config = {"loss_id": handle.loss_id, "temperature": 0.5}
    assert training.forward_backward(ragged(0, [3]), "custom", config).result().metrics


def test_the_configuration_enables_what_the_server_implements(wire: Wire) -> None:
    config = wire.post("client/config", {"sdk_version": "0"})
    assert config.headers["connection"] == "close"
    for field in (
        "custom_loss_server_side",
        "create_model_via_load_weights",
        "sample_use_retrieve_futures",
        "sample_join_sampling_session",
    ):
        assert config.json()[field] is True
    assert wire.ok("client/dynamic_config", {"sdk_version": "0"})["sample_cancel_enabled"] is True
    (model,) = wire.http.get("get_server_capabilities").json()["supported_models"]
    assert (model["model_name"], model["max_context_length"]) == ("tiny-random", 512)


def test_a_finished_session_is_gone(running: RunningServer) -> None:
    with Wire(running.base_url) as client:
        reason = {"reason": {"type": "success"}}
        finish = f"sessions/{client.session_id}/finish"
        assert client.post(finish, {"reason": {"type": "bored"}}).status_code == 400
        assert client.post(finish, reason).json() is None
        assert client.post(finish, reason).status_code == 410
        heartbeat = {"session_id": client.session_id}
        assert client.post("session_heartbeat", heartbeat).status_code == 410


def test_a_loss_that_is_uploaded_twice_is_stored_once(wire: Wire, running: RunningServer) -> None:
    body = upload(SUM).model_copy(update={"session_id": wire.session_id}).model_dump(mode="json")
    losses = running._state.sessions.get(wire.session_id).losses
    for _ in range(2):
        result = wire.result(wire.ok("create_custom_loss", body))
        assert result["loss_id"] == f"{wire.session_id}:loss:0"
    assert list(losses) == [f"{wire.session_id}:loss:0"]
    other = wire.post("create_custom_loss", {**body, "name": "other"})
    assert other.status_code == 409
    events = {"events": [], "platform": "x", "sdk_version": "0", "process_uuid": "x"}
    sent = wire.ok("telemetry", {**events, "session_id": wire.session_id})
    assert sent["status"] == "accepted"
