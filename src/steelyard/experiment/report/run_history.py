"""Sentences on what happened to a run: changed settings, the best checkpoint, an early stop."""

from __future__ import annotations

from pathlib import Path

from steelyard.experiment.checkpointing import best_checkpoint
from steelyard.experiment.report.formatting import number
from steelyard.experiment.run_dir import RunFolder


def run_history(folder: Path) -> list[str]:
    """Sentences from the files of a run; none if nothing of that happened.

    Raises:
        RunError: a file is damaged.
        CheckpointError: the record of the best checkpoint is damaged.
    """
    run = RunFolder(folder)
    sentences = [
        f"From step {change['step']} on, {key} was set to {value}."
        for change in run.changes()
        for settings in change["set"]
        for key, value in settings.items()
    ]
    best = best_checkpoint(run)
    if best is not None:
        sentences.append(
            f"The best checkpoint, after {best.step} steps, has {best.metric} {number(best.value)}."
        )
    stopped = (run.result() or {}).get("stopped_early")
    if isinstance(stopped, str):
        sentences.append(f"{stopped[:1].upper()}{stopped[1:]}.")
    return sentences
