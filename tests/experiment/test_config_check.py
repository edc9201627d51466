"""Checking a config without training."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.errors import ConfigError
from steelyard.experiment import check_config, example_config, read_config


def test_a_check_sets_ranges_to_their_low_end(folder: Path) -> None:
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
def test_a_check_refuses_unknown_models_and_losses(
    folder: Path, override: str, message: str
) -> None:
    config = read_config({"data": {"path": "train.jsonl"}}, [override], folder=folder)
    with pytest.raises(ConfigError, match=message):
        check_config(config)
