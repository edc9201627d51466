from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError
from steelyard.experiment import check_config, example_config, read_config
from steelyard.experiment.build_terms import build_terms
from steelyard.experiment.config_errors import format_location
from steelyard.experiment.config_weights import SCHEDULES, check_weight, schedule_of
from steelyard.spec import schedules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("")
    return tmp_path


def test_a_mapping_is_checked_and_its_paths_become_absolute(folder: Path) -> None:
    config = read_config({"data": {"path": "train.jsonl"}}, folder=folder)
    assert config.data.path == str(folder / "train.jsonl")
    assert config.python_path == [str(folder)]


def test_the_mapping_stays_as_it_was(folder: Path) -> None:
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
def test_an_override_is_toml_or_else_a_string(folder: Path, text: str, value: Any) -> None:
    raw = {
        "data": {"path": "train.jsonl"},
        "regularizers": [{"use": "l2", "weight": 1, "options": {"x": 0}}],
    }
    config = read_config(raw, [f"regularizers.l2.options.x={text}"], folder=folder)
    assert config.regularizers[0].options == {"x": value}


def test_every_broken_rule_is_named(folder: Path) -> None:
    raw = {"data": {"path": "train.jsonl"}, "train": {"steps": 0, "seed": -1}, "loss": {"usee": 1}}
    with pytest.raises(ConfigError) as caught:
        read_config(raw, folder=folder)
    assert str(caught.value).splitlines() == [
        "[train]: steps must be >= 1, got 0",
        "[train]: seed must be >= 0, got -1",
        "[loss]: usee is not a key; known: use, options; did you mean use?",
    ]


def test_a_resolved_config_is_a_config(folder: Path) -> None:
    raw = {
        "data": {"path": "train.jsonl", "held_out": "train.jsonl"},
        "regularizers": [{"use": "l2", "weight": {"tune": [0.1, 1]}}],
        "sinks": {"wandb": {"project": "p"}},
    }
    config = read_config(raw, folder=folder)
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    assert read_config(folder / "config.json") == config


@pytest.mark.parametrize(
    ("value", "made"),
    [
        (0.5, 0.5),
        ({"constant": [0.2]}, schedules.constant(0.2)),
        ({"cosine": [1, 0, 5]}, schedules.cosine(1, 0, 5)),
        ({"exponential": [1, 0.5]}, schedules.exponential(1, 0.5)),
        ({"linear": [0, 1, 5]}, schedules.linear(0, 1, 5)),
        ({"piecewise": {"0": 0.1, "100": 0.5}}, schedules.piecewise({0: 0.1, 100: 0.5})),
        ({"warmup": [0.1, 10]}, schedules.warmup(0.1, 10)),
    ],
)
def test_every_schedule_can_be_written(value: Any, made: Any) -> None:
    assert check_weight(value) == value
    assert schedule_of(value) == made


def test_the_schedules_are_those_of_the_library() -> None:
    # By epoch, a schedule of another: a run counts steps.
    assert list(SCHEDULES) == [name for name in schedules.__all__ if name != "by_epoch"]


@pytest.mark.parametrize(
    "value",
    [
        {"tune": [0.1]},
        {"tune": [0, 1], "log": True},
        {"tune": [0.1, 1], "log": 1},
        {"tune": [0.1, 1], "step": 2},
        {"tune": ["a", 1]},
        {"warmup": [1, 2], "linear": [0, 1, 2]},
        {"piecewise": [0, 1]},
        {"piecewise": {"1": 1}},
        {"warmup": 3},
        True,
        None,
    ],
)
def test_what_is_no_weight_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        check_weight(value)


@pytest.mark.parametrize(
    ("loc", "said"),
    [
        (("train", "steps"), "[train]: steps"),
        (("regularizers", 1, "weight"), "[[regularizers]] #2: weight"),
        (("regularizers", 0), "[[regularizers]] #1"),
        (("sinks", "wandb", "mode"), "[sinks]: wandb.mode"),
        (("data",), "[data]"),
        (("imports",), "imports"),
        ((), "the config"),
    ],
)
def test_a_place_is_written_as_in_the_file(loc: tuple[str | int, ...], said: str) -> None:
    assert format_location(loc) == said


@pytest.mark.parametrize(
    ("use", "options", "reads"),
    [
        ("kl_to_reference", {}, True),
        ("kl_to_reference", {"reference": "other"}, False),
        ("squared_log_ratio", {}, True),
        ("adaptive", {"regularizer": "kl_to_reference", "target": 1.0}, True),
        ("adaptive", {"regularizer": "l2", "target": 1.0}, False),
        ("l2", {}, False),
    ],
)
def test_terms_say_whether_they_read_the_reference(
    folder: Path, use: str, options: dict[str, Any], reads: bool
) -> None:
    raw = {
        "data": {"path": "train.jsonl"},
        "regularizers": [{"use": use, "weight": 1, "options": options}],
    }
    assert build_terms(read_config(raw, folder=folder)).reads_reference is reads


def test_a_check_gives_the_regularizers_with_open_weights_at_their_low_end(folder: Path) -> None:
    (folder / "example.toml").write_text(example_config(), encoding="utf-8")
    config = read_config(folder / "example.toml", ["regularizers.kl.weight={tune = [0.5, 2.0]}"])
    kl, entropy = check_config(config)
    assert (kl.name, kl.weight, entropy.name, entropy.weight) == ("kl", 0.5, "entropy", 0.01)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.base_model=gpt-9", r"\[model\]: base_model must be"),
        ("loss.use=no", r"\[loss\]: use"),
    ],
)
def test_a_check_refuses_what_training_would(folder: Path, override: str, message: str) -> None:
    config = read_config({"data": {"path": "train.jsonl"}}, [override], folder=folder)
    with pytest.raises(ConfigError, match=message):
        check_config(config)


def test_a_loss_of_ones_own_takes_options(folder: Path) -> None:
    (folder / "own_loss_of_mine.py").write_text(
        "def scaled(data, logprobs, by):\n    return by * -sum(lp.sum() for lp in logprobs)\n"
    )
    loss = {"use": "own_loss_of_mine:scaled", "options": {"by": 2}}
    config = read_config({"data": {"path": "train.jsonl"}, "loss": loss}, folder=folder)
    import torch  # noqa: PLC0415 - for this test

    assert build_terms(config).loss([], [torch.tensor([-1.0])]) == 2
    wrong = {"use": "own_loss_of_mine:scaled", "options": {"buy": 2}}
    config = read_config({"data": {"path": "train.jsonl"}, "loss": wrong}, folder=folder)
    with pytest.raises(ConfigError, match=r"^\[loss\]: fn must accept"):
        build_terms(config)
