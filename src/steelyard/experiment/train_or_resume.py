"""Train a run, or resume it if its folder holds one already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from steelyard.errors import RunError
from steelyard.experiment.config import Config
from steelyard.experiment.config_secrets import changed_keys, literal_secrets
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.service_address import remember_address
from steelyard.experiment.training_loop import Outcome, resume, train
from steelyard.experiment.watcher import Watcher


def train_or_resume(
    config: Config, folder: Path, *, watch: Watcher, stop: Callable[[], bool]
) -> Outcome:
    """Train a run from its config, or from its last checkpoint; a finished one is returned.

    Raises:
        SteelyardError: as `train` and `resume` do.
        RunError: the folder holds a run of another config.
    """
    if holds_run_of(config, folder):
        remember_address(config.model)
        secrets = literal_secrets(config.model_dump(mode="json"))
        return resume(folder, secrets, watch=watch, stop=stop)
    return train(config, folder, watch=watch, stop=stop)


def holds_run_of(config: Config, folder: Path) -> bool:
    """Return whether a folder holds a run of this config; False if it holds none.

    `[tune]` may be another: a run does not read it.

    Raises:
        RunError: it holds a run of another config.
    """
    run = RunFolder(folder)
    if not run.holds_run:
        return False
    before, after = run.config().model_dump(mode="json"), config.model_dump(mode="json")
    for key in changed_keys(before, {**after, "tune": before["tune"]}):
        raise RunError(
            f"{folder} must be new or hold a run of this config, and it holds one with another "
            f"{key}: choose another folder."
        )
    return True
