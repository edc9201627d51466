"""Checkpoints of a run: the client's state, and a JSON record that points to it.

The record is written atomically, and after the state that it points to. Whenever the process is
killed, the newest record points to a complete checkpoint. Random numbers and the order of the data
are functions of the seed and the step, so the record holds only these two.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steelyard.clients import RegularizedClient
from steelyard.errors import CheckpointError
from steelyard.experiment.run_dir import RunFolder, write_atomic


@dataclass(frozen=True)
class RunCheckpoint:
    """Record of a checkpoint.

    Attributes:
        step: number of completed steps.
        path: path of the client's checkpoint.
        seed: seed of random numbers and of the order of the data.
        metrics_bytes: size of `metrics.jsonl` when the checkpoint was saved.
        terms: state of the regularizers, if the client's checkpoint does not contain it.
    """

    step: int
    path: str
    seed: int
    metrics_bytes: int
    terms: dict[str, Any] | None


def save(client: RegularizedClient, run: RunFolder, step: int, seed: int, keep: int) -> None:
    """Save a checkpoint after `step` steps, and delete all but the last `keep` checkpoints.

    Raises:
        CheckpointError: the disk or the service failed; older checkpoints are unchanged.
        RunError: the record could not be written.
    """
    size = run.measured()
    path = client.save_state(f"step-{step:08d}", overwrite=True).result().path
    # A local client saves the state of attached regularizers with its own; the SDK's cannot.
    terms = None if hasattr(client.client, "attach") else client.state_dict()
    record = asdict(RunCheckpoint(step, path, seed, size, terms))
    write_atomic(run.checkpoints / f"step-{step:08d}.json", json.dumps(record, indent=2).encode())
    _delete_old(run, keep)


def latest_checkpoint(run: RunFolder) -> RunCheckpoint | None:
    """Newest record of a run; None before the first.

    Raises:
        CheckpointError: the record is damaged.
    """
    records = _records(run)
    if not records:
        return None
    try:
        return RunCheckpoint(**json.loads(records[-1].read_text("utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{records[-1]} must be a whole record: {error}.") from error


def load(client: RegularizedClient, checkpoint: RunCheckpoint) -> None:
    """Restore the weights, the optimizer and the regularizers' state of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """
    client.load_state_with_optimizer(checkpoint.path).result()
    if checkpoint.terms is not None:
        client.load_state_dict(checkpoint.terms)


def _records(run: RunFolder) -> list[Path]:
    return sorted(run.checkpoints.glob("step-*.json"))


def _delete_old(run: RunFolder, keep: int) -> None:
    # Records first: killed in between, this leaves checkpoints without a record, which the next
    # call deletes, and never a record without its checkpoint.
    records = _records(run)
    kept = {json.loads(record.read_text("utf-8"))["path"] for record in records[-keep:]}
    for record in records[:-keep]:
        record.unlink()
    for link in run.checkpoints.glob("*/weights/step-*"):
        if f"tinker://{link.relative_to(run.checkpoints).as_posix()}" not in kept:
            folder = link.resolve()
            link.unlink()
            shutil.rmtree(folder, ignore_errors=True)
