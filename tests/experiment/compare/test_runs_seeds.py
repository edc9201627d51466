"""Configs and folders of several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError
from steelyard.experiment.compare.runs import seed_folder, seeded_configs
from steelyard.experiment.config.data_tables import sources_of
from steelyard.experiment.config.schema import Config
from tests.experiment.small_runs import small_config


def test_seeds_follow_that_of_the_config_and_share_its_held_out_lines(folder: Path) -> None:
    config = small_config(folder, "train.seed=3")
    configs = seeded_configs(config, 3)
    assert list(configs) == [3, 4, 5]
    assert configs[3] is config
    assert [each.train.seed for each in configs.values()] == [3, 4, 5]
    assert [each.source.split_seed for each in configs.values()] == [None, 3, 3]
    given = seeded_configs(small_config(folder, "data.split_seed=8"), 2)
    assert [each.source.split_seed for each in given.values()] == [8, 8]


def test_seeds_share_the_tasks_of_the_config() -> None:
    """Other tasks would have other held-out prompts."""
    task = {"use": "reasoning_gym:chain_sum"}
    for prompts, expected in (
        (task, [3]),
        ([task, {**task, "seed": 9}, {"use": "datasets:a"}], [3, 9, None]),
    ):
        config = Config.model_validate(
            {
                "rollouts": {"prompts": prompts},
                "rewards": [{"use": "length", "options": {"max_words": 3}}],
                "train": {"seed": 3},
            }
        )
        configs = seeded_configs(config, 2)
        assert configs[3] is config
        assert configs[4].rollouts is not None
        sources = sources_of(configs[4].rollouts.prompts)
        assert [source.seed for source in sources] == expected


def test_the_runs_of_the_first_seed_are_in_the_folder_itself(folder: Path) -> None:
    config = small_config(folder, "train.seed=3")
    assert seed_folder(folder, config, 3) == folder
    assert seed_folder(folder, config, 4) == folder / "seed-4"


@pytest.mark.parametrize("seeds", [0, -2, 2.0, "2", True])
def test_the_number_of_seeds_must_be_whole_and_positive(folder: Path, seeds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^seeds must be a whole number >= 1, got "):
        seeded_configs(small_config(folder), seeds)
