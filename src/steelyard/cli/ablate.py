"""The command `steelyard ablate`: train with and without each term, and compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.exit_codes import INTERRUPTED
from steelyard.cli.train import Overrides, SkipBad

if TYPE_CHECKING:
    from steelyard.experiment import Ablation


def ablate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", "-r", help="Folder of all runs; an existing ablation is continued."),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Number of runs at the same time.")
    ] = 1,
    skip_bad: SkipBad = False,
) -> None:
    """Train with all terms, without each one, and with none; compare."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import run_with_display  # noqa: PLC0415 - as above

    settings = [*(overrides or ()), *(["data.skip_bad=true"] if skip_bad else ())]
    parsed = experiment.read_config(config, settings)
    folder = run or Path("runs") / f"{config.stem}-ablation"
    ablation = run_with_display(
        lambda watch, stop: experiment.ablate(parsed, folder, jobs=jobs, watch=watch, stop=stop)
    )
    _print_table(ablation)
    if not ablation.done:
        typer.echo(f"Stopped and saved. Run the same command again to continue: {ablation.folder}")
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"Done: {len(ablation.runs)} runs in {ablation.folder}")


def _print_table(ablation: Ablation) -> None:
    from rich.console import Console  # noqa: PLC0415 - takes a moment
    from rich.table import Table  # noqa: PLC0415 - as above

    if not ablation.table:
        return
    first = ablation.table[0]  # the run with all terms
    terms = list(first["terms"])
    table = Table(title="effect of each term: final held-out values (change from the run 'all')")
    for column in ("run", "held-out loss", *terms, "time"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in ablation.table:
        cells = [_with_change(row["held_out/loss"], first["held_out/loss"])]
        cells += [_with_change(row["terms"].get(term), first["terms"].get(term)) for term in terms]
        table.add_row(row["run"], *cells, f"{row['seconds']:.1f} s")
    console = Console()
    console.width = max(console.width, 40 + 22 * len(terms))
    console.print(table)


def _with_change(value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    if first is None or value == first:
        return f"{value:.4g}"
    return f"{value:.4g} ({value - first:+.2g})"
