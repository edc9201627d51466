from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from steelyard.engine import KNOWN_MODELS, LocalServiceClient, find_model, model_folder, tiny
from steelyard.errors import InputError, ModelError

UNKNOWN = [
    "gpt-17",
    "",
    None,
    3,
    ["tiny-random"],
    "./nowhere",
    "/nowhere/model",
    "~nobody/model",
    "a/b/c",
    "TINY-RANDOM",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_model_is_an_error_that_lists_the_known_and_the_three_ways(
    service: LocalServiceClient, name: Any
) -> None:
    for call in (find_model, service.create_lora_training_client):
        with pytest.raises(ModelError) as caught:
            call(name)
        assert str(caught.value) == (
            "base_model must be a known name (smollm2-135m, tiny-random), the path of a folder as "
            f"transformers writes it, or a Hub id (organisation/name), got {name!r}."
        )


def test_known_models_say_where_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    assert {name: model_folder(name) for name in KNOWN_MODELS} == {
        "smollm2-135m": tmp_path / "models" / "smollm2-135m",
        "tiny-random": None,
    }


def test_a_folder_without_a_config_is_an_error(service: LocalServiceClient, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"with a config\.json, got .* without one: write it with"):
        service.create_lora_training_client(str(tmp_path))


def test_a_folder_that_transformers_cannot_load_is_an_error(
    service: LocalServiceClient, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ModelError, match="must be one that transformers can load as a causal"):
        service.create_lora_training_client(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="must be one that transformers can load as a causal"):
        service.create_lora_training_client(str(tmp_path))


def test_a_hub_id_that_cannot_be_reached_is_an_error(
    service: LocalServiceClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="base_model 'steelyard-tests/none' must be one that"):
        service.create_lora_training_client("steelyard-tests/none")
    service.create_lora_training_client("tiny-random", rank=1)


def test_a_folder_without_a_tokenizer_is_an_error_when_it_is_asked_for(
    service: LocalServiceClient, tmp_path: Path
) -> None:
    tiny.build(torch.float32).save_pretrained(tmp_path)
    client = service.create_lora_training_client(str(tmp_path), rank=1)
    with pytest.raises(ModelError, match="must be one that transformers can load"):
        client.get_tokenizer()


def test_the_home_folder_may_be_written_short(
    service: LocalServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.build(torch.float32).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert service.create_lora_training_client("~/model", rank=1).get_info().model_name == "~/model"


def test_the_tiny_model_is_the_same_every_time() -> None:
    built = []
    for seed in (4, 5):
        torch.manual_seed(seed)
        built.append(tiny.build(torch.float32).state_dict())
    first, second = built
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    expected = torch.rand(2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), expected)  # and nobody else's chance is touched


def test_the_tiny_tokenizer_has_a_token_for_each_byte() -> None:
    tokenizer = tiny.tokenizer()
    text = "Grüße, 世界! \n\t🙂"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eos_token_id == 256


def test_the_service_says_what_it_knows(service: LocalServiceClient) -> None:
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
