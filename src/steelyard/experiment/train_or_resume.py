"""Train a run, or resume it if its folder holds one already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from steelyard.experiment.config import Config
from steelyard.experiment.config_secrets import literal_secrets
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.training_loop import Outcome, resume, train
from steelyard.experiment.watcher import Watcher


def train_or_resume(
    config: Config, folder: Path, *, watch: Watcher, stop: Callable[[], bool]
) -> Outcome:
    """Train a run from its config, or from its last checkpoint; a finished one is returned.

    Raises:
        SteelyardError: as `train` and `resume` do.
    """
    if RunFolder(folder).holds_run:
        secrets = literal_secrets(config.model_dump(mode="json"))
        return resume(folder, secrets, watch=watch, stop=stop)
    return train(config, folder, watch=watch, stop=stop)
