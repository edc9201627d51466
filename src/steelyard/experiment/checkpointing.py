"""Checkpoints of a run: the client's own state, and a record of where the run was.

The record is written, whole, after the state it points to. Whenever the writer was killed, the
newest record points to a whole checkpoint. Random numbers and the order of the data are
functions of the seed and the step, so the step is all that is needed of them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steelyard.clients import RegularizedClient
from steelyard.errors import CheckpointError
from steelyard.experiment.run_dir import RunFolder, write_whole


@dataclass(frozen=True)
class RunCheckpoint:
    """Where a run was.

    Attributes:
        step: how many steps were made.
        path: the client's checkpoint.
        seed: what random numbers and the order of the data follow, together with the step.
        metrics_bytes: how long the metrics were.
        terms: what the regularizers remember, where the checkpoint does not hold it.
    """

    step: int
    path: str
    seed: int
    metrics_bytes: int
    terms: dict[str, Any] | None


def save(client: RegularizedClient, run: RunFolder, step: int, seed: int, keep: int) -> None:
    """Save the run after `step` steps; all but the last `keep` checkpoints go.

    Raises:
        CheckpointError: the disk, or the service, refuses; older checkpoints are as they were.
        RunError: the disk refuses the record.
    """
    size = run.measured()
    path = client.save_state(f"step-{step:08d}", overwrite=True).result().path
    terms = None if hasattr(client.client, "attach") else client.state_dict()
    record = asdict(RunCheckpoint(step, path, seed, size, terms))
    write_whole(run.checkpoints / f"step-{step:08d}.json", json.dumps(record, indent=2).encode())
    _sweep(run, keep)


def last_saved(run: RunFolder) -> RunCheckpoint | None:
    """The newest record; None if nothing was saved yet.

    Raises:
        CheckpointError: it is damaged.
    """
    records = _records(run)
    if not records:
        return None
    try:
        return RunCheckpoint(**json.loads(records[-1].read_text("utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{records[-1]} must be a whole record: {error}.") from error


def load(client: RegularizedClient, saved: RunCheckpoint) -> None:
    """Put the client where it was.

    Raises:
        CheckpointError: the checkpoint is gone or damaged.
    """
    client.load_state_with_optimizer(saved.path).result()
    if saved.terms is not None:
        client.load_state_dict(saved.terms)


def _records(run: RunFolder) -> list[Path]:
    return sorted(run.checkpoints.glob("step-*.json"))


def _sweep(run: RunFolder, keep: int) -> None:
    """Remove old records, then, on this machine, every checkpoint that no record points to."""
    records = _records(run)
    kept = {json.loads(record.read_text("utf-8"))["path"] for record in records[-keep:]}
    for record in records[:-keep]:
        record.unlink()
    for link in run.checkpoints.glob("*/weights/step-*"):
        if f"tinker://{link.relative_to(run.checkpoints).as_posix()}" not in kept:
            folder = link.resolve()
            link.unlink()
            shutil.rmtree(folder, ignore_errors=True)
