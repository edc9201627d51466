from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from steelyard.engine import LocalServiceClient, tiny
from steelyard.engine.model_sources import KNOWN_MODELS, find_model, model_folder
from steelyard.errors import ModelError

UNKNOWN = [
    "gpt-17",
    "",
    None,
    3,
    ["tiny-random"],
    "./nowhere",
    "/nowhere/model",
    "~nobody/model",
    "~no-such-user/model",
    "n" * 5000,
    "a\0b",
    "a/b/c",
    "TINY-RANDOM",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_model_is_an_error_that_lists_the_known_models(
    service: LocalServiceClient, name: Any
) -> None:
    for call in (find_model, service.create_lora_training_client):
        with pytest.raises(ModelError) as caught:
            call(name)
        assert str(caught.value) == (
            "base_model must be a known name (smollm2-135m, tiny-random), the path of a folder as "
            f"transformers writes it, or a Hub id (organisation/name), got {name!r}."
        )


def test_model_folder_is_in_the_cache_or_none(
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


def test_a_folder_without_a_tokenizer_is_an_error_when_the_tokenizer_is_used(
    service: LocalServiceClient, tmp_path: Path
) -> None:
    tiny.build(torch.float32).save_pretrained(tmp_path)
    client = service.create_lora_training_client(str(tmp_path), rank=1)
    with pytest.raises(ModelError, match="must be one that transformers can load"):
        client.get_tokenizer()


def test_a_path_may_begin_with_a_tilde(
    service: LocalServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.build(torch.float32).save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert service.create_lora_training_client("~/model", rank=1).get_info().model_name == "~/model"


def test_the_location_of_a_model_is_what_other_libraries_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name, location in (("./model", str(tmp_path / "model")), ("org/name", "org/name")):
        source = find_model(name)
        assert source.location is not None
        assert source.location() == location
    assert find_model("tiny-random").location is None


def test_code_beside_a_model_is_not_run_and_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a terminal transformers asks whether to run it; a run folder may name such a model."""
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "evil.py").write_text(code)
    classes = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": "evil.T"}
    config = {"model_type": "evil", "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}})
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    source = find_model(str(tmp_path))
    with pytest.raises(ModelError, match="base_model"):
        source.model(None)
    with pytest.raises(ModelError, match="base_model"):
        source.tokenizer()
    assert not (tmp_path / "ran").exists()
