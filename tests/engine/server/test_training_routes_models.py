from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from steelyard.engine.server.app import RunningServer
from tests.engine.data import ragged

from .training_requests import send
from .wire_client import Wire, error_of


def test_an_unknown_id_is_not_found(wire: Wire) -> None:
    for response in (
        wire.batch("nobody", 1, ragged(0, [2])),
        wire.step("nobody", 1),
        wire.post("get_info", {"model_id": "nobody"}),
        wire.post("save_weights", {"model_id": "nobody", "path": "x"}),
        wire.post("unload_model", {"model_id": "nobody"}),
    ):
        assert response.status_code == 404
        assert "model_id must be one that is here, got 'nobody'" in error_of(response)
    assert wire.post("retrieve_future", {"request_id": "nothing"}).status_code == 404
    assert wire.http.get("samplers/nothing").status_code == 404
    assert wire.post("session_heartbeat", {"session_id": "nobody"}).status_code == 404


def create(wire: Wire, **changed: Any) -> httpx.Response:
    body = {
        "session_id": wire.session_id,
        "model_seq_id": 0,
        "base_model": "tiny-random",
        "lora_config": {"rank": 4},
    }
    return wire.post("create_model", {**body, **changed})


def test_an_invalid_create_model_request_is_rejected(wire: Wire) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"base_model": "Qwen/Qwen3-8B"}, "was started with (tiny-random), got 'Qwen/Qwen3-8B'"),
        ({"base_model": "/etc"}, "was started with (tiny-random), got '/etc'"),
        ({"lora_config": {"rank": 0}}, "rank must be a whole number >= 1, got 0"),
        ({"lora_config": {"rank": 10**9}}, "rank must be at most 512"),
        ({"lora_config": {"rank": 4, "seed": -1}}, "seed must be a whole number"),
        ({"lora_config": None}, "lora_config must be given"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer must be Adam"),
        ({"model_seq_id": "x"}, "CreateModelRequest.model_seq_id is not right"),
        ({"more": 1}, "CreateModelRequest.more is not right: Extra inputs"),
    ]
    for changed, why in cases:
        response = create(wire, **changed)
        assert response.status_code == 400, changed
        assert why in error_of(response)
    assert create(wire, session_id="nobody").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/etc",
        "~",
        "tinker://../weights/x",
        "tinker://run/weights/../../x",
        "tinker://run/other/x",
        "tinker://run",
        "tinker://nobody/weights/none",
        "file:///etc",
        "",
    ],
)
def test_a_path_outside_the_checkpoints_is_rejected(wire: Wire, path: str) -> None:
    model = wire.model()
    loaded = wire.post(
        "load_weights", {"model_id": model, "seq_id": 1, "path": path, "optimizer": False}
    )
    if loaded.status_code == 200:
        failed = wire.result(loaded.json())
        assert failed["category"] == "user"
    else:
        assert loaded.status_code == 400
    resumed = wire.post(
        "load_weights",
        {"session_id": wire.session_id, "model_seq_id": 9, "path": path, "optimizer": False},
    )
    assert resumed.status_code == 400
    error_of(resumed)
    sampled = wire.post(
        "create_sampling_session",
        {"session_id": wire.session_id, "sampling_session_seq_id": 0, "model_path": path},
    )
    assert sampled.status_code == 400
    error_of(sampled)
    assert wire.post("weights_info", {"tinker_path": path}).status_code in (400, 404)


def test_clients_cannot_load_from_folders_of_the_server(wire: Wire, folder: Path) -> None:
    model = wire.model()
    wire.result(wire.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "real"}))
    path = str(folder / model / "weights" / "real")
    assert Path(path, "adapter_model.safetensors").is_file()
    body = {"session_id": wire.session_id, "path": path, "optimizer": False}
    for response in (
        wire.post("load_weights", {**body, "model_seq_id": 9}),
        wire.post(
            "load_weights", {"model_id": model, "seq_id": 2, "path": path, "optimizer": False}
        ),
        wire.post(
            "create_sampling_session",
            {"session_id": wire.session_id, "sampling_session_seq_id": 0, "model_path": path},
        ),
        wire.post("weights_info", {"tinker_path": path}),
    ):
        assert response.status_code == 400
        assert "path must start with tinker://" in error_of(response)


def test_a_repeated_create_model_request_creates_one_model(
    wire: Wire, running: RunningServer
) -> None:
    model = wire.model()
    send(wire, model, 1)
    body = {
        "session_id": wire.session_id,
        "model_seq_id": 0,
        "base_model": "tiny-random",
        "lora_config": {"rank": 4, "seed": 0},
    }
    before = running._state.runs[model]
    assert wire.result(wire.ok("create_model", body))["model_id"] == model
    assert running._state.runs[model] is before


def test_unloading_a_model_cancels_its_queued_requests(wire: Wire, running: RunningServer) -> None:
    model = wire.model()
    gate = threading.Event()
    running._state.runs[model].client._worker.submit(gate.wait)
    waiting = [wire.step(model, 1).json(), wire.step(model, 3).json()]
    unloaded = wire.result(wire.ok("unload_model", {"model_id": model}))
    assert unloaded == {"model_id": model, "type": None}
    gate.set()
    for future in waiting:
        assert wire.result(future)["error"] == "the model was unloaded."
    assert wire.step(model, 2).status_code == 404


def test_the_tokenizer_is_loaded_offline(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sampling = sdk.create_sampling_client(base_model="tiny-random")
    for client in (training, sampling):
        tokenizer = client.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("Hej, world")) == "Hej, world"
    named = sampling.get_base_model()
    again = sdk.create_lora_training_client(named, rank=2, seed=0)
    assert again.get_info().model_name == "tiny-random", "the folder is a name of the model too"


def test_a_model_number_belongs_to_one_request(wire: Wire) -> None:
    body = {
        "session_id": wire.session_id,
        "model_seq_id": 5,
        "base_model": "tiny-random",
        "lora_config": {"rank": 2, "seed": 0},
    }
    first = wire.ok("create_model", body)
    wire.result(first)
    assert wire.ok("create_model", body) == first
    other = wire.post("create_model", {**body, "lora_config": {"rank": 3, "seed": 0}})
    assert other.status_code == 409
    assert "got another one with other contents" in other.json()["detail"]
