"""`steelyard report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or an ablation's.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file; report.html in a single folder, or here."),
    ] = None,
) -> None:
    """Write one HTML page about runs: charts, samples, config. It needs no network."""
    from steelyard.experiment.report import write_report  # noqa: PLC0415 - takes seconds

    place = runs[0] if len(runs) == 1 else Path()
    target = output or place / "report.html"
    typer.echo(f"Report: {write_report(runs, target)}")
