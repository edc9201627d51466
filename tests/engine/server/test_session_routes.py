from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinker

from steelyard.engine.server import session_routes
from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.uploaded_loss.validate import validate_loss
from tests.engine.data import ragged

from .uploaded_loss.graphs import LOGPROBS, SUM, X, call, upload
from .wire_client import Wire, start


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


def upload_at_once(
    running: RunningServer, wires: list[Wire], factors: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Upload losses that are all validated before one of them is stored; return the statuses."""
    everybody = threading.Barrier(len(wires))

    def together(*args: Any) -> Any:
        everybody.wait(600)
        return validate_loss(*args)

    monkeypatch.setattr(session_routes, "validate_loss", together)

    def send(wire: Wire, factor: int, number: int) -> int:
        request = upload(call("torch.mul", LOGPROBS, factor), call("torch.sum", X, name="y"))
        ids = {"session_id": wire.session_id, "custom_loss_seq_id": number}
        body = {**request.model_dump(mode="json"), **ids}
        return wire.post("create_custom_loss", body).status_code

    with ThreadPoolExecutor(len(wires)) as threads:
        numbers = range(len(wires)) if len(set(factors)) > 1 else [0] * len(wires)
        return sorted(threads.map(send, wires, factors, numbers))


def test_two_clients_upload_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        start(tmp_path, max_losses=1) as running,
        Wire(running.base_url) as first,
        Wire(running.base_url) as second,
    ):
        assert upload_at_once(running, [first, second], [2, 3], monkeypatch) == [200, 200]


def test_one_client_that_uploads_at_once_stays_within_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, max_losses=1) as running, Wire(running.base_url) as wire:
        assert upload_at_once(running, [wire] * 3, [2, 3, 4], monkeypatch) == [200, 403, 403]


def test_a_loss_that_is_sent_twice_at_once_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path, max_losses=1) as running, Wire(running.base_url) as wire:
        assert upload_at_once(running, [wire] * 2, [2, 2], monkeypatch) == [200, 200]
        (session,) = running._state.sessions
        assert len(session.losses) == 1


def test_an_upload_that_breaks_off_leaves_its_number_free(wire: Wire) -> None:
    request = upload(call("torch.exp", LOGPROBS), call("torch.sum", X, name="y"))
    body = {**request.model_dump(mode="json"), "session_id": wire.session_id}
    content = json.dumps(body).encode()
    url = wire.http.base_url
    head = (
        f"POST {url.path}create_custom_loss HTTP/1.1\r\nHost: {url.host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head.encode() + content[: len(content) // 2])
    uploaded = wire.result(wire.ok("create_custom_loss", body))
    assert uploaded["loss_id"].startswith(wire.session_id)
