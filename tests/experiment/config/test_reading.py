"""Config files, mappings and overrides."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from steelyard.errors import ConfigError
from steelyard.experiment import read_config


def test_paths_of_a_mapping_become_absolute(folder: Path) -> None:
    config = read_config({"data": {"path": "train.jsonl"}}, folder=folder)
    assert config.data is not None
    assert config.data.path == str(folder / "train.jsonl")
    assert config.python_path == [str(folder)]


def test_a_base_model_is_a_folder_beside_the_config_or_else_in_the_current_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder / "elsewhere"
    for name in ("models/a", "models/b", "tiny-random"):
        (elsewhere / name).mkdir(parents=True)
    (folder / "models/a").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)

    def base_model(given: str, **settings: str) -> str:
        raw = {"data": {"path": "train.jsonl"}, "model": {"base_model": given, **settings}}
        return read_config(raw, folder=folder).model.base_model

    assert base_model("models/a") == str(folder / "models/a")
    assert base_model("models/b") == str(elsewhere / "models/b")
    assert base_model("tiny-random") == "tiny-random", "a known name, not the folder"
    assert base_model("models/c") == "models/c", "may be a Hub id"
    assert base_model("models/a", backend="tinker") == "models/a", "a name on the service"


def test_the_mapping_is_not_changed(folder: Path) -> None:
    raw = {"data": {"path": "train.jsonl"}, "train": {"steps": 3}}
    read_config(raw, ["train.steps=5"], folder=folder)
    assert raw["train"] == {"steps": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("1e-3", 1e-3),
        ("true", True),
        ("'5'", "5"),
        ("plain words", "plain words"),
        ("[1, 2]", [1, 2]),
        ("{ warmup = [0.1, 10] }", {"warmup": [0.1, 10]}),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_the_value_of_an_override_is_toml_or_else_a_string(
    folder: Path, text: str, value: Any
) -> None:
    raw = {
        "data": {"path": "train.jsonl"},
        "regularizers": [{"use": "l2", "weight": 1, "options": {"x": 0}}],
    }
    config = read_config(raw, [f"regularizers.l2.options.x={text}"], folder=folder)
    assert config.regularizers[0].options == {"x": value}


def test_a_resolved_config_can_be_read_again(folder: Path) -> None:
    raw = {
        "data": {"path": "train.jsonl", "held_out": "train.jsonl"},
        "regularizers": [{"use": "l2", "weight": {"tune": [0.1, 1]}}],
        "sinks": {"wandb": {"project": "p"}},
    }
    config = read_config(raw, folder=folder)
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    assert read_config(folder / "config.json") == config


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", '[data]\npath = "train.jsonl"\n[train]\nlearning_rate = 1e-4\n'),
        ("c.yaml", "data: {path: train.jsonl}\ntrain: {learning_rate: 1e-4}\n"),
        ("c.yml", "data:\n  path: train.jsonl\ntrain:\n  learning_rate: 1e-4\n"),
        ("c.json", '{"data": {"path": "train.jsonl"}, "train": {"learning_rate": 1e-4}}'),
    ],
)
def test_files_of_every_format_hold_the_same_config(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    config = read_config(folder / name)
    assert config.train.learning_rate == 1e-4, "YAML 1.1 would read 1e-4 as a string"
    assert config == read_config(
        {"data": {"path": "train.jsonl"}, "train": {"learning_rate": 1e-4}}, folder=folder
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.ini", "", r"^a config must be a \.toml, \.yaml, \.yml or \.json file, got"),
        ("c.toml", "[data", r"c\.toml must be TOML, and it is not: "),
        ("c.yaml", "a: [", r"c\.yaml must be YAML, and it is not: "),
        ("c.json", "{", r"c\.json must be JSON, and it is not: "),
        ("c.json", "[" * 100_000, r"c\.json must be JSON that is less nested\.$"),
        ("c.yaml", "yes: 1", r"^a key must be a string, got True: write it in quotes$"),
        ("c.json", "[]", r"c\.json must hold a table of keys, got list\.$"),
        ("missing.toml", None, r"^a config must be a file that can be read, got .*: No such file"),
    ],
)
def test_files_that_are_no_config_are_refused(
    folder: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(folder / name)


def test_a_mapping_may_hold_paths_and_other_mappings(folder: Path) -> None:
    table = MappingProxyType({"path": folder / "train.jsonl"})
    read = read_config(MappingProxyType({"data": table}))
    assert read.data is not None
    assert read.data.path == str(folder / "train.jsonl")


def test_a_mapping_that_json_cannot_hold_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="must be a mapping that JSON can hold: it cannot hold a"):
        read_config({"data": {"path": "train.jsonl"}, "train": {"steps": {5}}}, folder=folder)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", r"must look like train\.steps=5, got 'train\.steps'\.$"),
        ("train..steps=5", r"must look like train\.steps=5"),
        ("train.\nsteps=5", r"must look like train\.steps=5"),
        ("regularizers.l1.weight=1", r"must name one of \['l2', 'e'\], got 'l1'\.$"),
        ("data.path.x=1", r"the override data\.path\.x must name a key of a table"),
        ("data.path.x.y=1", r"must name a key of a table, and 'x' is in none"),
    ],
)
def test_overrides_that_name_no_key_are_refused(folder: Path, override: str, message: str) -> None:
    entries = [{"use": "l2", "weight": 1}, {"use": "entropy", "name": "e", "weight": 1}]
    raw = {"data": {"path": "train.jsonl"}, "regularizers": entries}
    with pytest.raises(ConfigError, match=message):
        read_config(raw, [override], folder=folder)


def test_paths_start_from_the_folder_of_the_file(folder: Path) -> None:
    (folder / "sub").mkdir()
    config = {"data": {"path": "../train.jsonl"}, "python_path": ["lib", "."]}
    (folder / "sub" / "c.json").write_text(json.dumps(config))
    read = read_config(folder / "sub" / "c.json")
    assert read.data is not None
    assert read.data.path == str(folder / "train.jsonl")
    assert read.python_path == [str(folder / "sub" / "lib"), str(folder / "sub")]
    with pytest.raises(ConfigError, match=r"^\[data\]: held_out must be a file that exists, got"):
        read_config(folder / "sub" / "c.json", ["data.held_out=none.jsonl"])
