"""The models that are listed, and the memory that they are said to need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants

from steelyard.engine import tiny
from steelyard.engine.model_listing import ModelSize, list_models, size_of
from steelyard.engine.model_sources import cached_models, find_model
from steelyard.errors import ModelError
from steelyard.experiment import read_config

from .hub_cache import write_cached_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and of ours; no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path / "steelyard"))
    return tmp_path / "hub"


def parameters_of(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_known_models_have_their_numbers(cache: Path) -> None:
    smollm2, random = list_models()
    assert (smollm2.name, smollm2.place) == ("smollm2-135m", "not downloaded yet (98 MB)")
    model = tiny.build(torch.float32)
    assert random.size == ModelSize(parameters_of(model), 512, 64, 128, 2, 512)
    # The shapes of the model that it is, without its weights.
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        of_shapes = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    assert smollm2.size == ModelSize(parameters_of(of_shapes), 8192, 576, 1536, 30, 49152)


def test_a_model_that_was_downloaded_says_where(cache: Path) -> None:
    folder = cache.parent / "steelyard" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert list_models()[0].place == f"in {folder}"


@pytest.mark.parametrize(
    ("numbers", "measured"),
    [
        ((134_515_008, 576, 1536, 30, 49_152), 4.5e9),
        ((170_938_368, 1024, 2816, 12, 8192), 3.55e9),
        ((53_823_744, 256, 512, 4, 100_000), 2.53e9),
    ],
)
def test_the_memory_of_training_is_near_what_was_measured(
    numbers: tuple[int, int, int, int, int], measured: float
) -> None:
    parameters, *shape = numbers
    size = ModelSize(parameters, 2048, *shape)
    assert size.training_bytes == pytest.approx(measured, rel=0.08)
    assert size.weight_bytes == 4 * parameters


def test_a_model_in_the_cache_of_the_hub_has_a_short_name(cache: Path) -> None:
    snapshot = write_cached_model(cache, "Organisation/Model-1B-Instruct")
    (_, random, cached) = list_models()
    assert cached.name == "model-1b-instruct"
    assert cached.place == "Organisation/Model-1B-Instruct, in the cache of the Hub"
    assert cached.size == random.size
    source = find_model("model-1b-instruct")
    assert source.hub_id == "Organisation/Model-1B-Instruct"
    assert parameters_of(source.model(torch.float32)) == random.size.parameters
    assert source.tokenizer().encode("hi") == tiny.tokenizer().encode("hi")
    assert cached_models()["model-1b-instruct"].folder == snapshot


def test_a_config_keeps_the_id_that_a_short_name_stands_for(cache: Path) -> None:
    write_cached_model(cache, "Organisation/Model-1B")
    data = cache.parent / "d.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')

    def base_model(name: str) -> str:
        raw = {"model": {"base_model": name}, "data": {"path": str(data)}}
        return read_config(raw).model.base_model

    assert base_model("model-1b") == "Organisation/Model-1B"
    assert base_model("model-2b") == "model-2b"  # which is refused where it is looked for
    assert base_model("a/b") == "a/b"
    assert base_model("tiny-random") == "tiny-random"


def test_models_with_one_short_name_are_named_by_their_ids(cache: Path) -> None:
    for hub_id in ("a/Same", "b/same", "c/Tiny-Random", "d/other"):
        write_cached_model(cache, hub_id)
    assert sorted(cached_models()) == ["a/Same", "b/same", "c/Tiny-Random", "other"]
    with pytest.raises(ModelError, match="base_model must be a known name"):
        find_model("same")


def test_what_is_no_language_model_or_has_no_weights_is_not_listed(cache: Path) -> None:
    write_cached_model(cache, "a/encoder", "BertModel")
    (write_cached_model(cache, "a/bare") / "model.safetensors").unlink()
    (write_cached_model(cache, "a/damaged") / "config.json").write_text("{")
    (write_cached_model(cache, "a/odd") / "config.json").write_text('{"architectures": 3}')
    (cache / "datasets--a--set" / "snapshots" / "1").mkdir(parents=True)
    (cache / "models--a--empty" / "snapshots").mkdir(parents=True)
    assert cached_models() == {}


def test_files_that_do_not_say_it_leave_numbers_out(tmp_path: Path) -> None:
    nothing = ModelSize(None, None, None, None, None, None)
    assert size_of(tmp_path) == nothing
    assert (nothing.weight_bytes, nothing.training_bytes) == (None, None)
    (tmp_path / "config.json").write_text(
        '{"hidden_size": "wide", "text_config": {"vocab_size": 7}}'
    )
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert size_of(tmp_path) == ModelSize(None, None, None, None, None, 7)
    (tmp_path / "config.json").write_text("[]")
    assert size_of(tmp_path) == nothing


def test_weights_in_several_files_are_counted_once(tmp_path: Path) -> None:
    model = tiny.build(torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    (tmp_path / "consolidated.safetensors").write_bytes(b"not counted")
    assert size_of(tmp_path).parameters == parameters_of(model)
