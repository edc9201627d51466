"""The example config."""

from __future__ import annotations

import tomllib
from pathlib import Path

from steelyard.experiment import Config, read_config, train
from steelyard.experiment.config.reading import example_config


def test_the_example_is_a_valid_config(folder: Path) -> None:
    (folder / "example.toml").write_text(example_config(), encoding="utf-8")
    config = read_config(folder / "example.toml")
    assert [(term.use, term.name, term.weight) for term in config.regularizers] == [
        ("kl_to_reference", "kl", {"warmup": [0.05, 10]}),
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


def test_the_example_of_on_policy_training_is_a_valid_config(folder: Path) -> None:
    (folder / "prompts.jsonl").touch()
    (folder / "example.toml").write_text(example_config(on_policy=True), encoding="utf-8")
    config = read_config(folder / "example.toml")
    assert [(each.use, each.name) for each in config.rewards] == [("length", "short")]
    assert config.rollouts is not None
    assert config.rollouts.prompts == str(folder / "prompts.jsonl")


def test_the_example_of_on_policy_training_shows_the_defaults() -> None:
    raw = tomllib.loads(example_config(on_policy=True))
    assert set(raw) == {"model", "rollouts", "train", "loss", "rewards", "regularizers"}
    needed = {"rollouts": {"prompts": "prompts.jsonl"}, "rewards": [{"use": "length"}]}
    defaults = Config.model_validate(needed).model_dump()
    own = {"evaluate_every", "options"}
    for table in ("model", "rollouts", "train", "loss"):
        shown = {key: value for key, value in raw[table].items() if key not in own}
        assert shown == {key: defaults[table][key] for key in shown}


def test_a_newcomer_can_run_the_example_of_on_policy_training(folder: Path) -> None:
    (folder / "example.toml").write_text(example_config(on_policy=True), encoding="utf-8")
    (folder / "prompts.jsonl").write_text('{"prompt": "Name a fruit."}\n' * 3, encoding="utf-8")
    smaller = ["model.base_model=tiny-random", "model.rank=2", "train.steps=2"]
    config = read_config(folder / "example.toml", [*smaller, "rollouts.max_tokens=6"])
    outcome = train(config, folder / "run")
    assert outcome.status == "done"
    assert "rewards/short/mean" in outcome.metrics
