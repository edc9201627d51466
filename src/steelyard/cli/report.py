"""The command `steelyard report`: one HTML page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders, or the folder of an ablation or a search."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write; default: report.html in the run folder, or here for several.",
        ),
    ] = None,
) -> None:
    """Write an HTML report about runs, an ablation or a search."""
    from steelyard.experiment.report import write_report  # noqa: PLC0415 - takes seconds

    folder = runs[0] if len(runs) == 1 else Path()
    target = output or folder / "report.html"
    if target.is_dir():
        raise typer.BadParameter(f"--output must be a file, got the folder {target}.")
    typer.echo(f"Report: {write_report(runs, target)}")
