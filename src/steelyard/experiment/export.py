"""Export the model of a run for other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from steelyard.errors import RunError
from steelyard.experiment.checkpointing import RunCheckpoint, find_checkpoint, with_checkpoint
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.trained_model import check_base_model


def export_run(
    folder: str | Path,
    target: str | Path,
    *,
    merge: bool = False,
    step: int | Literal["best"] | None = None,
    dtype: str | None = None,
) -> tuple[Path, RunCheckpoint]:
    """Write the model of a run into a new folder, as an adapter or as a whole model.

    Args:
        folder: run folder; the run need not be finished.
        target: folder to write; new or empty.
        merge: add the adapter to the base model's weights, and write a whole model.
        step: number of steps after which the checkpoint was saved; `"best"`: see
            `train.keep_best`; None: the newest one.
        dtype: of the weights of a whole model; None: the one that the run has here.

    Returns:
        The folder that was written, and the checkpoint in it.

    Raises:
        RunError: there is no such run or checkpoint, its base model is gone, or the checkpoint is
            on a Tinker service.
        CheckpointError: the checkpoint is damaged.
        InputError: the target is not empty or cannot be written, or the dtype is unknown.
    """
    from steelyard.engine import export_checkpoint  # noqa: PLC0415 - takes seconds

    run = RunFolder(folder)
    config = run.config()
    if config.model.backend == "tinker":
        checkpoint = find_checkpoint(run, step)
        raise RunError(
            f"{run.path} must be a run on this machine, and its weights are on a Tinker service: "
            f"get them with 'tinker checkpoint download {checkpoint.path} -o {target}'."
        )
    check_base_model(run, config.model)
    return with_checkpoint(
        run,
        step,
        lambda found: export_checkpoint(
            run.checkpoints,
            found.path,
            target,
            merge=merge,
            device=config.model.device,
            dtype=dtype or config.model.dtype,
        ),
    )
