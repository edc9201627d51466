"""Fixtures for the tests of experiments: folders, encoders, and a backend with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.engine.tiny import tokenizer
from steelyard.experiment import RunFolder, read_config
from steelyard.experiment.config.schema import ModelConfig
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.model.backend import Backend, open_backend

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an empty data file, `train.jsonl`."""
    (tmp_path / "train.jsonl").write_text("")
    return tmp_path


@pytest.fixture
def run(folder: Path) -> RunFolder:
    """A run folder with a config, in which no step was made."""
    run = RunFolder(folder / "run")
    with run.locked():
        run.begin(read_config({"data": {"path": "train.jsonl"}}, folder=folder))
    return run


@pytest.fixture(scope="session")
def plain() -> Encoder:
    """An encoder without a chat template; one token is one byte."""
    return Encoder(tokenizer(), max_length=64)


@pytest.fixture(scope="session")
def chat() -> Encoder:
    """An encoder with a chat template."""
    chat_tokenizer = tokenizer()
    chat_tokenizer.chat_template = TEMPLATE
    return Encoder(chat_tokenizer, max_length=200)


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    """An untrained tiny model on the CPU."""
    config = ModelConfig(base_model="tiny-random", rank=2, device="cpu", dtype="float32")
    opened = open_backend(config, seed=0, checkpoints=tmp_path / "checkpoints")
    yield opened
    opened.close()
