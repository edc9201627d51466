"""Checking a config without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError
from steelyard.experiment import Config, read_config
from steelyard.experiment.config.reading import example_config
from steelyard.experiment.training.terms import check_config


def test_a_check_sets_ranges_to_their_low_end(folder: Path) -> None:
    (folder / "example.toml").write_text(example_config(), encoding="utf-8")
    config = read_config(folder / "example.toml", ["regularizers.kl.weight={tune = [0.5, 2.0]}"])
    kl, entropy = check_config(config).specs
    assert (kl.name, kl.weight, entropy.name, entropy.weight) == ("kl", 0.5, "entropy", 0.01)


def test_a_check_builds_the_rewards(folder: Path) -> None:
    (folder / "prompts.jsonl").touch()
    (folder / "example.toml").write_text(example_config(on_policy=True), encoding="utf-8")
    config = read_config(folder / "example.toml", ["rewards.short.weight={tune = [0.5, 2.0]}"])
    terms = check_config(config)
    assert [(each.name, each.weight) for each in terms.rewards] == [("short", 0.5)]
    assert [spec.name for spec in terms.specs] == ["kl"]
    wrong = read_config(folder / "example.toml", ["rewards.short.use=size"])
    with pytest.raises(ConfigError, match=r"^\[\[rewards\]\] #1: use must be a ready-made reward"):
        check_config(wrong)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.base_model=gpt-9", r"\[model\]: base_model must be"),
        ("loss.use=no", r"\[loss\]: use"),
    ],
)
def test_a_check_refuses_unknown_models_and_losses(
    folder: Path, override: str, message: str
) -> None:
    config = read_config({"data": {"path": "train.jsonl"}}, [override], folder=folder)
    with pytest.raises(ConfigError, match=message):
        check_config(config)


def test_a_check_refuses_tasks_that_there_are_not(folder: Path) -> None:
    def config(**source: Any) -> Config:
        prompts = [{"use": "reasoning_gym:leg_counting"}, source]
        return read_config({"rollouts": {"prompts": prompts}}, folder=folder)

    terms = check_config(config(use="reasoning_gym:chain_sum", options={"min_terms": 2}))
    assert [reward.name for reward in terms.rewards] == ["score"]
    with pytest.raises(ConfigError, match="names none; did you mean 'chain_sum'"):
        check_config(config(use="reasoning_gym:chain_sun"))
    with pytest.raises(ConfigError, match="options of reasoning_gym:chain_sum must be valid"):
        check_config(config(use="reasoning_gym:chain_sum", options={"min_term": 2}))


@pytest.mark.parametrize("name", ["on_policy", "sums"])
def test_the_examples_are_valid(name: str) -> None:
    config = read_config(Path(__file__).parents[3] / "examples" / f"{name}.toml")
    assert check_config(config).rewards
