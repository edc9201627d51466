"""Go on from a checkpoint of a run in a new folder, with other settings."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import ConfigError, RunError
from steelyard.experiment.config.reading import validate_config
from steelyard.experiment.config.schema import BranchConfig
from steelyard.experiment.config.secrets import redacted_keys
from steelyard.experiment.run.changes import merged_config, parse_settings
from steelyard.experiment.run.checkpoints import (
    RunCheckpoint,
    best_files,
    record_file,
    with_checkpoint,
)
from steelyard.experiment.run.folder import RunFolder
from steelyard.output.run_files import read_json_object

_STEPS = "train.steps"
# Copied whole; what is of later steps is cut when the run is resumed.
_COPIED = (
    *("data.json", "drivers.jsonl", "rollouts.jsonl", "samples.jsonl"),
    *("reference.safetensors", "base_answers.jsonl"),
)


@dataclass(frozen=True)
class Branch:
    """A branch, ready to be resumed.

    Attributes:
        folder: its run folder.
        secrets: `key=value` of the secrets that it needs again.
    """

    folder: Path
    secrets: list[str]


def make_branch(
    run: str | Path, step: int, settings: Iterable[str] = (), folder: str | Path | None = None
) -> Branch:
    """Make the folder of a run that goes on from a checkpoint of another one.

    It begins with the metrics, records and weights of that run up to the checkpoint; the settings
    hold from there on, as if they had been changed with `steelyard set` at that step.

    Args:
        run: the run folder to go on from; it is not changed.
        step: number of steps after which it saved the checkpoint.
        settings: `key=value`: what `steelyard set` takes, `train.steps`, and secrets that stood in
            the config itself.
        folder: the new run folder; None makes `<run>-at-<step>` beside the other.

    Raises:
        RunError: there is no such run or checkpoint, or the new folder holds a run.
        ConfigError: a setting is unknown, or a value breaks its rule; or no step is left.
    """
    parent = RunFolder(run)
    config = parent.config()
    steps, secrets, changes = _sorted(settings, redacted_keys(config.model_dump(mode="json")))
    raw = config.model_dump(mode="json")
    target = RunFolder(_beside(parent.path, step) if folder is None else folder)
    if target.holds_run:
        raise RunError(f"{target.path} must be empty or new, and it holds a run: choose another.")
    relative = os.path.relpath(parent.path.resolve(), target.path.resolve().parent)
    raw["branch"] = BranchConfig(run=relative, step=step).model_dump(mode="json")
    raw["train"]["steps"] = steps or raw["train"]["steps"]
    config = validate_config(raw)
    before = [change for change in parent.changes() if change["step"] < step]
    merged_config(config, [*(s for change in before for s in change["set"]), changes])  # valid?

    def copy(checkpoint: RunCheckpoint) -> None:
        if checkpoint.step >= config.train.steps:
            raise ConfigError(
                f"{_STEPS} must be more than the {step} steps that the branch begins with, got "
                f"{config.train.steps}: add {_STEPS}={step + 20}, for example."
            )
        with target.locked():
            _copy_checkpoints(parent, target, checkpoint)
            _copy_records(parent, target, checkpoint)
            # No request of the parent's is taken again: the branch has a file of its own.
            records = [{**change, "requests": 0} for change in before]
            records += [{"step": step, "set": [changes], "requests": 0}] if changes else []
            target.append_changes(records)
            target.begin(config)  # last: without a config the folder holds no run

    try:
        with_checkpoint(parent, step, copy)
    except OSError as error:
        raise RunError(
            f"{target.path} must be a folder that can be written, and copying {parent.path} there "
            f"failed: {error}."
        ) from error
    return Branch(target.path, secrets)


def _sorted(
    settings: Iterable[str], secret_keys: list[str]
) -> tuple[int | None, list[str], dict[str, Any]]:
    """Number of steps, assignments of secrets, and what `set` takes."""
    secrets: list[str] = []
    others: list[str] = []
    for assignment in settings:
        is_secret = assignment.partition("=")[0].strip() in secret_keys
        (secrets if is_secret else others).append(assignment)
    changes = parse_settings(others)
    steps = changes.pop(_STEPS, None)
    if steps is not None and type(steps) is not int:
        raise ConfigError(f"{_STEPS} must be a whole number, got {steps!r}.")
    return steps, secrets, changes


def _beside(run: Path, step: int) -> Path:
    """Folder that does not exist, named after a run and a step."""
    path = run.resolve()
    names = (path.with_name(f"{path.name}-at-{step}{end}") for end in ("", *_numbered()))
    return next(name for name in names if not name.exists())


def _numbered() -> Iterable[str]:
    return (f"-{number}" for number in range(2, 1000))


def _copy_checkpoints(parent: RunFolder, target: RunFolder, checkpoint: RunCheckpoint) -> None:
    """Copy the checkpoint, and the best one if it is not later, with their records."""
    records = {record_file(parent, checkpoint.step), *best_files(parent, checkpoint.step)}
    for record in sorted(records):
        path = read_json_object(record).get("path", "")
        source = parent.checkpoints / str(path).removeprefix("tinker://")
        # That of a Tinker service is not on this machine.
        if path and source.resolve().is_relative_to(parent.checkpoints.resolve()):
            link = target.checkpoints / source.relative_to(parent.checkpoints)
            if source.is_dir() and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                hidden = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
                shutil.copytree(source, hidden)
                link.symlink_to(hidden.name)
        target.checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(record, target.checkpoints / record.name)


def _copy_records(parent: RunFolder, target: RunFolder, checkpoint: RunCheckpoint) -> None:
    metrics = parent.metrics_file.read_bytes()[: checkpoint.metrics_bytes]
    target.metrics_file.write_bytes(metrics)
    for name in _COPIED:
        if (parent.path / name).is_file():
            shutil.copyfile(parent.path / name, target.path / name)
    target.keep_samples([sample for sample in target.samples() if sample["when"] == "before"])
