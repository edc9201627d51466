from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types

from steelyard.engine import LocalServiceClient
from steelyard.errors import ClosedError, InputError

from .data import SMALL, create, ragged, saved, squares


def test_the_capabilities_list_the_known_models(service: LocalServiceClient) -> None:
    known = service.get_server_capabilities().supported_models
    assert {model.model_name: model.max_context_length for model in known} == {
        "smollm2-135m": 8192,
        "tiny-random": 512,
    }
    assert all(model.trainable and model.sampleable for model in known)


@pytest.mark.parametrize("rank", [0, -4, 1.5, True, None])
def test_a_bad_rank_is_an_error_before_a_model_is_loaded(rank: Any) -> None:
    message = "rank must be a whole number >= 1, got"
    with LocalServiceClient() as service, pytest.raises(InputError, match=message):
        service.create_lora_training_client("no such model", rank=rank)


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    message = f"device must be on this machine, got '{device}', .* use 'cpu'"
    with pytest.raises(InputError, match=message):
        LocalServiceClient(device=device)


@pytest.mark.parametrize("device", ["gpu", "", 3.5])
def test_a_bad_device_is_an_error(device: Any) -> None:
    with pytest.raises(InputError, match="device must be one that torch knows, got"):
        LocalServiceClient(device=device)


@pytest.mark.parametrize("dtype", ["int8", "float", torch.float32, 3, ["float32"]])
def test_a_bad_dtype_is_an_error(dtype: Any) -> None:
    with pytest.raises(
        InputError, match="dtype must be one of bfloat16, float16, float32, float64"
    ):
        LocalServiceClient(dtype=dtype)


@pytest.mark.parametrize("limit", [0, -1, 2.5, "100", True])
def test_a_bad_limit_is_an_error(limit: Any) -> None:
    with pytest.raises(InputError, match="max_tokens must be a whole number >= 1 or None, got"):
        LocalServiceClient(max_tokens=limit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_base_weights_have_the_chosen_dtype(dtype: str) -> None:
    with LocalServiceClient(dtype=dtype, device=torch.device("cpu")) as service:
        client = service.create_lora_training_client("tiny-random", rank=1, seed=0)
        weights = dict(client._worker.model._net.named_parameters())
        name = "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"
        assert weights[name].dtype == getattr(torch, dtype)


def test_neither_weights_nor_a_base_model_is_an_error(service: LocalServiceClient) -> None:
    with pytest.raises(InputError, match="model_path or base_model must be given, got neither"):
        service.create_sampling_client()


def test_the_folder_of_checkpoints_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CHECKPOINTS", str(tmp_path))
    with LocalServiceClient() as service:
        client = create(service)
        saved(client)
    assert (tmp_path / client.model_id / "weights" / "a" / "checkpoint.json").is_file()


def test_an_access_token_is_an_error(service: LocalServiceClient, trained: Any) -> None:
    path = saved(trained)
    for load in (
        trained.load_state,
        trained.load_state_with_optimizer,
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        with pytest.raises(InputError, match="weights_access_token is for the Tinker service"):
            load(path, weights_access_token="token")


def test_another_optimizer_is_an_error(service: LocalServiceClient, trained: Any) -> None:
    dimuon = types.DimuonOptimizerConfig()
    with pytest.raises(InputError, match="optimizer must be AdamOptimizerConfig"):
        create(service, optimizer=dimuon)
    with pytest.raises(InputError, match="optimizer must be AdamOptimizerConfig"):
        service.create_training_client_from_state(saved(trained), optimizer=dimuon)
    create(service, optimizer=types.AdamOptimizerConfig())


def test_a_closed_service_finishes_the_running_call_and_refuses_others(tmp_path: Path) -> None:
    service = LocalServiceClient(checkpoint_dir=tmp_path)
    client = create(service)
    began = threading.Event()
    gate = threading.Event()

    def work() -> str:
        began.set()
        gate.wait()
        return "done"

    first = client._worker.submit(work)
    began.wait()
    second = client.optim_step(SMALL)
    closing = threading.Thread(target=lambda: service.close("success").result())
    closing.start()
    gate.set()
    closing.join()
    assert first.result() == "done"
    with pytest.raises(concurrent.futures.CancelledError):
        second.result()
    for call in (
        lambda: client.forward(ragged(0, [4]), "cross_entropy"),
        lambda: client.optim_step(SMALL),
        lambda: client.forward_backward_custom(ragged(0, [4]), squares),
        lambda: client.save_state("a"),
        client.weights,
        lambda: create(service),
        lambda: service.create_sampling_client(base_model="tiny-random"),
    ):
        with pytest.raises(ClosedError, match="the service must be open, got a closed one"):
            call()
    service.close("success").result()


def test_a_service_is_closed_at_the_end_of_its_block() -> None:
    with LocalServiceClient() as service:
        client = create(service)
    with pytest.raises(ClosedError):
        client.optim_step(SMALL)
