from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import tinker
import torch
from tinker import types

from steelyard.engine import LocalServiceClient
from steelyard.engine.server.app import RunningServer
from tests.engine.data import SMALL, datum, ragged

from .comparison import assert_alike, to_plain, traced_loss
from .training_requests import send_step
from .wire_client import Wire, encoded, error_of

BAD_DATA = {
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


@pytest.mark.parametrize("wrong", BAD_DATA)
def test_bad_data_are_rejected_and_change_nothing(wire: Wire, wrong: str) -> None:
    data, why = BAD_DATA[wrong]
    model = wire.model()
    before = wire.probe(model, 1)
    response = wire.batch(model, 2, data)
    assert response.status_code == 400
    assert why in error_of(response)
    after = wire.probe(model, 3)
    assert after.metrics == before.metrics
    norm = wire.result(wire.step(model, 4).json())["metrics"]["unclipped_grad_l2:mean"]
    assert norm == 0.0, "no gradient was gathered"


def test_an_unknown_loss_is_rejected(wire: Wire) -> None:
    model = wire.model()
    response = wire.batch(model, 1, ragged(0, [3]), "stable_reinforce")
    assert response.status_code == 400
    assert "loss_fn must be one of cross_entropy" in error_of(response)
    response = wire.batch(model, 2, ragged(0, [3]), "ppo", {"clip": 1.0})
    assert "may hold ['clip_high_threshold'" in error_of(response)
    response = wire.batch(model, 3, ragged(0, [3]), "custom", {"loss_id": "none"})
    assert "a loss this client has uploaded, got 'none'" in error_of(response)


@pytest.mark.parametrize(
    ("body", "status"), [(b"\xff\xff\xff", 400), (b"", 404), (b"not a protobuf", 400)]
)
def test_a_body_that_is_no_protobuf_batch_is_rejected(wire: Wire, body: bytes, status: int) -> None:
    response = wire.http.post("forward_backward", content=body)
    assert response.status_code == status
    error_of(response)


def test_invalid_adam_parameters_are_rejected(wire: Wire) -> None:
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
        assert why in error_of(response)
    body = b'{"model_id": "%s", "seq_id": 3, "adam_params": {"learning_rate": NaN}}'
    assert wire.post("optim_step", body % model.encode()).status_code == 400


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/passwd", "a/b", ".hidden", "", "x" * 201, "a b", None]
)
def test_an_invalid_checkpoint_name_is_rejected(wire: Wire, name: str | None) -> None:
    model = wire.model()
    response = wire.post("save_weights", {"model_id": model, "seq_id": 1, "path": name})
    assert response.status_code == 400
    assert "the name of a checkpoint must be 1 to 200 letters" in error_of(response)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("optim_step", {"adam_params": {"learning_rate": None}}),
        ("optim_step", {"adam_params": {"learning_rate": -1}}),
        ("save_weights", {"path": 3}),
        ("save_weights", {"path": "../x"}),
        ("save_weights_for_sampler", {"path": "a/b"}),
        ("save_weights_for_sampler", {"more": 1}),
        ("save_weights_for_sampler", {}),
        ("load_weights", {"path": "/etc", "optimizer": False}),
        ("load_weights", {"path": "tinker://x", "optimizer": "maybe"}),
        ("load_weights", {"path": "tinker://x", "optimizer": False, "weights_access_token": "x"}),
    ],
)
def test_later_requests_do_not_wait_for_a_rejected_one_of_any_type(
    wire: Wire, path: str, body: dict[str, Any]
) -> None:
    model = wire.model()
    later = send_step(wire, model, 2)
    for _ in range(2):
        rejected = wire.post(path, {"model_id": model, "seq_id": 1, **body})
        assert rejected.status_code == 400, rejected.text
    assert "metrics" in wire.result(later)


@pytest.mark.parametrize("path", ["optim_step", "save_weights", "load_weights"])
@pytest.mark.parametrize("first", [True, False])
def test_later_requests_do_not_wait_for_one_that_is_too_large(
    strict: RunningServer, path: str, first: bool
) -> None:
    with Wire(strict.base_url, "tml-secret") as wire:
        model = wire.model()
        later = send_step(wire, model, 2)
        filler, ids = {"path": "x" * 9000}, {"model_id": model, "seq_id": 1}
        rejected = wire.post(path, {**ids, **filler} if first else {**filler, **ids})
        assert rejected.status_code == 413, rejected.text
        assert "metrics" in wire.result(later)
        wire.ok("unload_model", {"model_id": model})


def test_later_requests_do_not_wait_for_a_batch_that_is_cut_off(wire: Wire) -> None:
    model = wire.model()
    later = send_step(wire, model, 2)
    body = encoded(model, 1, ragged(0, [4, 3]))
    rejected = wire.http.post("forward_backward", content=body[:-9])
    assert rejected.status_code == 400, rejected.text
    assert "metrics" in wire.result(later)


def test_a_state_is_loaded_into_an_existing_model(
    training: tinker.TrainingClient, local: LocalServiceClient
) -> None:
    path = training.save_state("before").result().path
    before = training.forward(ragged(0, [9]), "cross_entropy").result()
    training.forward_backward(ragged(0, [9]), "cross_entropy").result()
    training.optim_step(SMALL).result()
    changed = training.forward(ragged(0, [9]), "cross_entropy").result()
    assert changed.metrics != before.metrics
    with pytest.warns(FutureWarning, match="load_state"):
        training.load_state(path).result()
    after = training.forward(ragged(0, [9]), "cross_entropy").result()
    assert after.metrics == before.metrics
    with pytest.warns(FutureWarning, match="load_state"):
        training.load_state_with_optimizer(path).result()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_batch_in_chunks_is_the_sum_of_its_chunks(
    sdk: tinker.ServiceClient, local: LocalServiceClient, compressed: bool
) -> None:
    small = {"fwdbwd_max_chunk_len": 3, "proto_compress_fwdbwd": compressed}
    holder = sdk.holder
    config = holder._client_config.model_copy(update=small)
    holder._client_config = config
    holder._constructor_kwargs["_client_config"] = config
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=1)
    theirs = sdk.create_lora_training_client("tiny-random", rank=4, seed=1)
    data = ragged(4, [5, 9, 2, 7, 3, 3, 8, 1, 6, 4])
    handle = sdk.create_custom_loss(traced_loss, {"logprobs": 1, "weights": 1}).result()
    local_handle = local.create_custom_loss(traced_loss, {"logprobs": 1, "weights": 1}).result()
    served: list[Any] = []
    expected: list[Any] = []
    for client, loss, into in ((theirs, handle, served), (mine, local_handle, expected)):
        into.append(client.forward_backward(data, "cross_entropy").result())
        into.append(client.forward_backward_custom(data, loss).result())
        into.append(client.optim_step(SMALL).result())
        into.append(client.forward(data, "cross_entropy").result())
    for ours, others in zip(served, expected, strict=True):
        assert_alike(to_plain(ours), to_plain(others))
    assert len(served[0].loss_fn_outputs) == 10


def test_an_uploaded_loss_takes_one_forward_pass(
    running: RunningServer, sdk: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = sdk.create_lora_training_client("tiny-random", rank=4, seed=0)
    handle = sdk.create_custom_loss(traced_loss, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None
    model = running._state.runs[training.model_id].client._worker.model
    calls: list[str] = []
    original = type(model).__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(threading.current_thread().name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", counted)
    training.forward_backward_custom(ragged(3, [6, 2]), handle).result()
    assert [name.startswith("steelyard-engine") for name in calls] == [True]
