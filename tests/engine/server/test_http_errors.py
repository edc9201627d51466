"""What is wrong is turned away at once, in one sentence, and the model stays as it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import torch
import zstandard
from tinker import types

from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import SMALL, datum, ragged

from .wire_client import Wire, encoded, start


def said(response: httpx.Response) -> str:
    detail: str = response.json()["detail"]
    assert "\n" not in detail
    assert detail.endswith(".")
    return detail


DATA = {
    "out of the vocabulary": ([datum([1, 512])], "tokens from 0 to 511"),
    "a negative token": ([datum([1, -1])], "tokens from 0 to 511"),
    "a target out of the vocabulary": ([datum([1, 2], [1, 600])], "got 600"),
    "too short": ([datum([1, 2, 3], [1, 2])], "must have the shape [T] or [T, K] with T = 3"),
    "weights too long": ([datum([1, 2], weights=[1.0, 1.0, 1.0])], "the shape of target_tokens"),
    "NaN": ([datum([1, 2], weights=[1.0, math.nan])], "must be finite, got nan at [1]"),
    "infinite": ([datum([1, 2], weights=[math.inf, 1.0])], "must be finite, got inf at [0]"),
    "no data": ([], "at least one Datum"),
    "no targets": (
        [types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={})],
        "must hold 'target_tokens'",
    ),
    "too long": ([datum(list(range(500)) + list(range(100)))], "1 to 512 tokens"),
    "empty": ([datum([], [])], "1 to 512 tokens"),
    "floats": ([datum([1, 2], torch.tensor([1.0, 2.0]))], "whole numbers"),
    "an image": (
        [
            types.Datum(
                model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")]),
                loss_fn_inputs={"target_tokens": types.TensorData(data=[1], dtype="int64")},
            )
        ],
        "text tokens alone",
    ),
}


@pytest.mark.parametrize("wrong", DATA)
def test_bad_data_are_turned_away(wire: Wire, wrong: str) -> None:
    data, why = DATA[wrong]
    model = wire.model()
    before = wire.weights(model, 1)
    response = wire.batch(model, 2, data)
    assert response.status_code == 400
    assert why in said(response)
    after = wire.weights(model, 3)
    assert after.metrics == before.metrics
    norm = wire.answer(wire.step(model, 4).json())["metrics"]["unclipped_grad_l2:mean"]
    assert norm == 0.0, "no gradient was gathered"


def test_an_unknown_loss_is_turned_away(wire: Wire) -> None:
    model = wire.model()
    response = wire.batch(model, 1, ragged(0, [3]), "gspo")
    assert response.status_code == 400
    assert "loss_fn must be one of cross_entropy" in said(response)
    response = wire.batch(model, 2, ragged(0, [3]), "ppo", {"clip": 1.0})
    assert "may hold ['clip_high_threshold'" in said(response)
    response = wire.batch(model, 3, ragged(0, [3]), "custom", {"loss_id": "none"})
    assert "a loss this client has uploaded, got 'none'" in said(response)


@pytest.mark.parametrize(
    ("body", "status"), [(b"\xff\xff\xff", 400), (b"", 404), (b"not a protobuf", 400)]
)
def test_a_body_that_is_no_batch_is_turned_away(wire: Wire, body: bytes, status: int) -> None:
    response = wire.http.post("forward_backward", content=body)
    assert response.status_code == status
    said(response)


def test_a_model_that_is_not_here_is_not_found(wire: Wire) -> None:
    for response in (
        wire.batch("nobody", 1, ragged(0, [2])),
        wire.step("nobody", 1),
        wire.post("get_info", {"model_id": "nobody"}),
        wire.post("save_weights", {"model_id": "nobody", "path": "x"}),
        wire.post("unload_model", {"model_id": "nobody"}),
    ):
        assert response.status_code == 404
        assert "model_id must be one that is here, got 'nobody'" in said(response)
    assert wire.post("retrieve_future", {"request_id": "nothing"}).status_code == 404
    assert wire.http.get("samplers/nothing").status_code == 404
    assert wire.post("session_heartbeat", {"session_id": "nobody"}).status_code == 404


def create(wire: Wire, **changed: Any) -> httpx.Response:
    asked = {
        "session_id": wire.session_id,
        "model_seq_id": 0,
        "base_model": "tiny-random",
        "lora_config": {"rank": 4},
    }
    return wire.post("create_model", {**asked, **changed})


def test_a_model_that_cannot_be_made_is_turned_away(wire: Wire) -> None:
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
        assert why in said(response)
    assert create(wire, session_id="nobody").status_code == 404


def test_settings_of_a_step_that_cannot_be_are_turned_away(wire: Wire) -> None:
    model = wire.model()
    for number, (params, why) in enumerate(
        [
            ({"learning_rate": -1}, "learning_rate must be >= 0 and finite, got -1.0"),
            ({"beta1": 1.0}, "beta1 must be in [0, 1)"),
            ({"learning_rate": "fast"}, "OptimStepRequest"),
        ],
        start=1,
    ):
        response = wire.post(
            "optim_step", {"model_id": model, "seq_id": number, "adam_params": params}
        )
        assert response.status_code == 400
        assert why in said(response)
    body = b'{"model_id": "%s", "seq_id": 3, "adam_params": {"learning_rate": NaN}}'
    assert wire.post("optim_step", body % model.encode()).status_code == 400


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/passwd", "a/b", ".hidden", "", "x" * 201, "a b", None]
)
def test_a_checkpoint_may_not_lead_elsewhere(wire: Wire, name: str | None) -> None:
    model = wire.model()
    response = wire.post("save_weights", {"model_id": model, "seq_id": 1, "path": name})
    assert response.status_code == 400
    assert "the name of a checkpoint must be 1 to 200 letters" in said(response)


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
def test_a_path_may_not_lead_elsewhere(wire: Wire, path: str) -> None:
    model = wire.model()
    loaded = wire.post(
        "load_weights", {"model_id": model, "seq_id": 1, "path": path, "optimizer": False}
    )
    if loaded.status_code == 200:
        failed = wire.answer(loaded.json())
        assert failed["category"] == "user"
    else:
        assert loaded.status_code == 400
    resumed = wire.post(
        "load_weights",
        {"session_id": wire.session_id, "model_seq_id": 9, "path": path, "optimizer": False},
    )
    assert resumed.status_code == 400
    said(resumed)
    sampled = wire.post(
        "create_sampling_session",
        {"session_id": wire.session_id, "sampling_session_seq_id": 0, "model_path": path},
    )
    assert sampled.status_code == 400
    said(sampled)
    assert wire.post("weights_info", {"tinker_path": path}).status_code in (400, 404)


def test_folders_of_the_servers_machine_are_none_of_a_clients_business(
    wire: Wire, folder: Path
) -> None:
    model = wire.model()
    wire.answer(wire.ok("save_weights", {"model_id": model, "seq_id": 1, "path": "real"}))
    path = str(folder / model / "weights" / "real")
    assert Path(path, "adapter_model.safetensors").is_file()
    asked = {"session_id": wire.session_id, "path": path, "optimizer": False}
    for response in (
        wire.post("load_weights", {**asked, "model_seq_id": 9}),
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
        assert "path must start with tinker://" in said(response)


def sampler(wire: Wire) -> str:
    asked = {"session_id": wire.session_id, "sampling_session_seq_id": 0}
    made = wire.ok("create_sampling_session", {**asked, "base_model": "tiny-random"})
    sampler_id: str = made["sampling_session_id"]
    return sampler_id


def test_samples_that_cannot_be_are_turned_away(wire: Wire) -> None:
    sampler_id = sampler(wire)
    good: dict[str, Any] = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"prompt": {"chunks": []}}, 400, "1 to 512 tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [512]}]}}, 400, "511"),
        ({"num_samples": 0}, 400, "num_samples"),
        ({"sampling_params": {"max_tokens": 2, "temperature": -1}}, 400, "temperature"),
        ({"num_samples": 2**19}, 413, "at most 1048576 tokens"),
        ({"num_samples": 2048, "sampling_params": {"max_tokens": 2**40}}, 413, "got 1048578"),
        ({"num_samples": 2048, "sampling_params": {}}, 413, "got 1048578"),
        ({"topk_sample_logprobs": 513}, 400, "topk_sample_logprobs"),
        ({"sampling_session_id": None}, 400, "must be given"),
        ({"sampling_session_id": "nobody"}, 404, "nobody"),
        ({"seq_id": 10**9}, 404, "join the sampling session first"),
        ({"seq_id": -1}, 404, "join the sampling session first"),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [10**9, 99]}},
            413,
            "cells",
        ),
        (
            {
                "target_prompt_logprobs": {
                    "data": [1],
                    "dtype": "int64",
                    "shape": [-5, -5],
                    "sparse_crow_indices": [0],
                    "sparse_col_indices": [9],
                }
            },
            400,
            "whole tensor",
        ),
        (
            {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [3]}},
            400,
            "whole tensor",
        ),
    ]
    for number, (changed, status, why) in enumerate(cases):
        response = wire.post("asample", {**good, "seq_id": number, **changed})
        assert response.status_code == status, (changed, response.text)
        assert why in said(response)
        again = wire.post("asample", {**good, "seq_id": number, **changed})
        assert again.status_code == status, "so too when it is sent again"
    assert wire.post("asample", {**good, "seq_id": 99}).status_code == 200


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with small limits, and a key."""
    with start(
        tmp_path_factory.mktemp("strict"),
        api_key="tml-secret",
        max_body=4000,
        max_tokens=50,
        max_models=2,
        max_sessions=3,
        max_samplers=2,
        max_losses=1,
        max_nodes=6,
    ) as running:
        yield running


def test_the_wrong_key_is_turned_away_at_once(
    strict: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # the SDK would send it with a wrong key for ever
    with pytest.raises(tinker.AuthenticationError, match="the API key must be the one"):
        tinker.ServiceClient(
            base_url=strict.base_url, api_key="tml-wrong"
        ).create_lora_training_client("tiny-random")
    bare = httpx.get(f"{strict.base_url}/api/v1/healthz")
    assert bare.status_code == 401
    odd = httpx.get(f"{strict.base_url}/api/v1/healthz", headers=[(b"X-API-Key", b"tml-secr\xe9t")])
    assert odd.status_code == 401
    right = httpx.get(f"{strict.base_url}/api/v1/healthz", headers={"X-API-Key": "tml-secret"})
    assert right.json() == {"status": "ok"}


def test_a_web_page_may_not_use_the_server(running: RunningServer) -> None:
    response = httpx.post(
        f"{running.base_url}/api/v1/create_session", headers={"Origin": "https://example.com"}
    )
    assert response.status_code == 403
    assert said(response) == "web pages are not allowed to use this server."


def test_everything_has_a_limit(strict: RunningServer) -> None:
    with tinker.ServiceClient(base_url=strict.base_url, api_key="tml-secret") as service:
        first = service.create_lora_training_client("tiny-random", rank=2, seed=0)
        with pytest.raises(tinker.APIStatusError, match="at most 50 tokens, got 60"):
            first.forward_backward(ragged(0, [30, 30]), "cross_entropy").result()
        with pytest.raises(tinker.APIStatusError, match="at most 4000 bytes"):
            first.forward_backward(ragged(0, [45], 40), "cross_entropy").result()
        assert first.optim_step(SMALL).result().metrics, "what stands behind goes on"
        service.create_lora_training_client("tiny-random", rank=2, seed=0)
        with pytest.raises(tinker.PermissionDeniedError, match="at most 2 models"):
            service.create_lora_training_client("tiny-random", rank=2, seed=0)

        def small(logprobs: Any) -> Any:
            return logprobs.sum(), {}

        def other(logprobs: Any) -> Any:
            return logprobs.mean(), {}

        def large(logprobs: Any) -> Any:
            return (logprobs + 1 + 2 + 3 + 4 + 5).sum(), {}

        with pytest.raises(tinker.BadRequestError, match="1 to 6 nodes, got 8"):
            service.create_custom_loss(large, {"logprobs": 1}).result()
        service.create_custom_loss(small, {"logprobs": 1}).result()
        with pytest.raises(tinker.PermissionDeniedError, match="at most 1 losses"):
            service.create_custom_loss(other, {"logprobs": 1}).result()
        samplers = [service.create_sampling_client(base_model="tiny-random") for _ in range(3)]
        assert samplers[2].get_base_model()
        with pytest.raises(tinker.NotFoundError, match="at most 2 are kept"):
            samplers[0].get_base_model()
        headers = {"X-API-Key": "tml-secret"}
        asked = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        with httpx.Client(base_url=strict.base_url, headers=headers) as http:
            found = [http.post("/api/v1/create_session", json=asked) for _ in range(3)]
        assert [response.status_code for response in found] == [200, 200, 403]


def test_a_body_that_was_packed_has_the_same_limit(wire: Wire, running: RunningServer) -> None:
    model = wire.model()
    body = encoded(model, 1, ragged(0, [3]))
    packed = zstandard.ZstdCompressor().compress(body)
    zipped = {"Content-Encoding": "zstd"}
    assert wire.http.post("forward_backward", content=packed, headers=zipped).status_code == 200
    bomb = zstandard.ZstdCompressor().compress(bytes(running._state.settings.max_body + 1))
    assert len(bomb) < 100_000
    response = wire.http.post("forward_backward", content=bomb, headers=zipped)
    assert response.status_code == 413
    large = encoded(model, 2, ragged(0, [3])) + bytes(running._state.settings.max_body)
    packed = zstandard.ZstdCompressor().compress(large)
    assert wire.http.post("forward_backward", content=packed, headers=zipped).status_code == 413
    assert "metrics" in wire.answer(wire.step(model, 3).json()), "what stands behind goes on"
    assert "bytes unpacked" in said(response)
    assert wire.http.post("forward_backward", content=body, headers=zipped).status_code == 400
    odd = wire.http.post("forward_backward", content=body, headers={"Content-Encoding": "br"})
    assert "must be zstd or identity, got 'br'" in said(odd)


def test_the_sdk_raises_at_once_and_goes_on(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    before = training.forward(ragged(0, [5]), "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="must be finite, got nan"):
        training.forward_backward(
            [datum([1, 2], weights=[1.0, math.nan])], "cross_entropy"
        ).result()
    with pytest.raises(tinker.BadRequestError, match="is none"):
        sdk.create_training_client_from_state(f"tinker://{training.model_id}/weights/no")
    with pytest.raises(tinker.BadRequestError, match="was started with"):
        sdk.create_lora_training_client("Qwen/Qwen3-8B")
    with pytest.raises(tinker.BadRequestError, match="name of a checkpoint"):
        training.save_state("a/b").result()
    training.save_state("twice").result()
    with pytest.raises(tinker.RequestFailedError, match="name must be free"):
        training.save_state("twice").result()
    after = training.forward(ragged(0, [5]), "cross_entropy").result()
    assert after.metrics == before.metrics


def test_an_engine_that_fails_fails_for_one_request(
    running: RunningServer, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = running._state.runs[training.model_id].client._trainer

    def broken(*_: Any) -> Any:
        raise RuntimeError("the engine is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "forward_backward", broken)
        with pytest.raises(
            tinker.RequestFailedError, match="RuntimeError: the engine is on fire"
        ) as e:
            training.forward_backward(ragged(0, [5]), "cross_entropy").result()
        assert e.value.category is types.RequestErrorCategory.Server
    training.forward_backward(ragged(0, [5]), "cross_entropy").result()
    training.optim_step(SMALL).result()


def test_a_server_that_fails_says_so_and_lives(
    running: RunningServer,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret path")

    with monkeypatch.context() as patched:
        patched.setattr(running._state.models, "capabilities", broken)
        response = wire.http.get("get_server_capabilities")
    assert response.status_code == 500
    assert response.json() == {"detail": "the server failed: RuntimeError"}
    assert response.headers["x-should-retry"] == "false"
    assert wire.http.get("get_server_capabilities").status_code == 200


def test_a_way_that_is_none_is_not_found(wire: Wire) -> None:
    assert wire.http.get("nowhere").status_code == 404
    assert wire.http.get("create_model").status_code == 405
