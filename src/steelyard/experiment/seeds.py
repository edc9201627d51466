"""The seeds of an experiment: the same config trained several times."""

from __future__ import annotations

from pathlib import Path

from steelyard.errors import ConfigError
from steelyard.experiment.config import Config


def seeded_configs(config: Config, seeds: int) -> dict[int, Config]:
    """Configs that differ in `train.seed`, by that seed: the config's own, and those after it.

    A seed sets the initial LoRA matrices, the order of the data, the sampled answers (unless
    `rollouts.seed` does) and the random numbers that terms draw. The held-out lines stay those of
    the config's own seed, so that all runs are measured on the same data. The first config is
    `config` itself.

    Raises:
        ConfigError: `seeds` is not a whole number >= 1.
    """
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ConfigError(f"seeds must be a whole number >= 1, got {seeds!r}.")
    first = config.train.seed
    return {seed: _with_seed(config, seed) for seed in range(first, first + seeds)}


def seed_folder(parent: Path, config: Config, seed: int) -> Path:
    """Folder of the runs with a seed: `parent` for the config's own, else `parent/seed-<seed>`."""
    return parent if seed == config.train.seed else parent / f"seed-{seed}"


def _with_seed(config: Config, seed: int) -> Config:
    if seed == config.train.seed:
        return config
    train = config.train.model_copy(update={"seed": seed})
    source = config.source
    if source.split_seed is None:
        source = source.model_copy(update={"split_seed": config.train.seed})
    return config.model_copy(update={"train": train, config.source_key: source})
