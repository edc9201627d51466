"""The command `steelyard export`: the model of a run, for other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.trained_run import Checkpoint, Run, Step, chosen_checkpoint


def export(
    run: Run,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write; new or empty.")
    ],
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Write a whole model, with the adapter added to its weights."),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Of a whole model: bfloat16, float16, float32; default: the run's."
        ),
    ] = None,
    step: Step = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Write the model of a run for other libraries."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    from steelyard.experiment import export_run  # noqa: PLC0415 - as above

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    chosen = chosen_checkpoint(step, checkpoint)
    written, record = export_run(run, folder, merge=merge, step=chosen, dtype=dtype)
    kind = "Model" if merge else "Adapter"
    typer.echo(f"{kind} after {record.step} steps: {written}")
