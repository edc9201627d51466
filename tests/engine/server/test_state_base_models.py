from __future__ import annotations

from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from transformers import AutoTokenizer

from steelyard.engine import tiny
from steelyard.engine.model_sources import SMOLLM2
from steelyard.engine.server.state import BaseModels


def test_the_tiny_tokenizer_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    (model,) = BaseModels({"tiny-random": 512}).offered
    assert model.tokenizer == str(tmp_path / "tokenizers" / "tiny-random")
    loaded = AutoTokenizer.from_pretrained(model.tokenizer)
    text = "Grüße, 世界!"
    assert loaded.encode(text) == tiny.tokenizer().encode(text)
    monkeypatch.setattr(tiny, "tokenizer", lambda: pytest.fail("made again"))
    assert BaseModels({"tiny-random": 512}).offered == [model]


def test_smollm2_has_its_tokenizer_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_CACHE", str(tmp_path))
    folder = tmp_path / "models" / SMOLLM2
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (model,) = BaseModels({SMOLLM2: 8192}).offered
    assert model.tokenizer == str(folder)


def test_other_models_are_named_by_folder_or_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    models = BaseModels({"mine": 10, "org/name": 20})
    mine, hub = models.offered
    assert mine.tokenizer == str(tmp_path / "mine")
    assert hub.tokenizer == "org/name"
    assert models.find(str(tmp_path / "mine")) is models.find("mine") is mine
    listed = models.capabilities().supported_models
    assert [(m.model_name, m.max_context_length) for m in listed] == [
        ("mine", 10),
        ("org/name", 20),
    ]
    with pytest.raises(HTTPException) as error:
        models.find("other")
    assert error.value.status_code == 400
    assert "was started with (mine, org/name), got 'other'" in error.value.detail
