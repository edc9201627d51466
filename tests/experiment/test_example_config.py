"""The example config."""

from __future__ import annotations

import tomllib
from pathlib import Path

from steelyard.experiment import Config, example_config, read_config


def test_the_example_is_a_valid_config(folder: Path) -> None:
    (folder / "example.toml").write_text(example_config(), encoding="utf-8")
    config = read_config(folder / "example.toml")
    assert [(term.use, term.name, term.weight) for term in config.regularizers] == [
        ("kl_to_reference", "kl", {"warmup": [0.1, 10]}),
        ("entropy", "", 0.01),
    ]
    assert config.data is not None
    assert config.data.path == str(folder / "train.jsonl")


def test_the_example_shows_the_defaults() -> None:
    raw = tomllib.loads(example_config())
    assert set(raw) == {"model", "data", "train", "loss", "regularizers", "sinks"}
    defaults = Config.model_validate({"data": {"path": "train.jsonl"}}).model_dump()
    own = {"sample_prompts", "options"}
    for table in ("model", "data", "train", "loss", "sinks"):
        shown = {key: value for key, value in raw[table].items() if key not in own}
        assert shown == {key: defaults[table][key] for key in shown}
