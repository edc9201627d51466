"""`steelyard ablate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.interruption import INTERRUPTED
from steelyard.cli.train import Overrides, SkipBad

if TYPE_CHECKING:
    from steelyard.experiment import Ablation


def ablate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="The folder of all runs; goes on there.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at once.")] = 1,
    skip_bad: SkipBad = False,
) -> None:
    """Train with all terms, without each one, and with none; compare."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import watched  # noqa: PLC0415 - as above

    chosen = [*(overrides or ()), *(["data.skip_bad=true"] if skip_bad else ())]
    read = experiment.read_config(config, chosen)
    folder = run or Path("runs") / f"{config.stem}-ablation"
    found = watched(
        lambda watch, stop: experiment.ablate(read, folder, jobs=jobs, watch=watch, stop=stop)
    )
    _show(found)
    if not found.done:
        typer.echo(f"Stopped, and saved. The same command goes on: {found.folder}")
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"Done: {len(found.runs)} runs in {found.folder}")


def _show(found: Ablation) -> None:
    from rich.console import Console  # noqa: PLC0415 - takes a moment
    from rich.table import Table  # noqa: PLC0415 - as above

    if not found.table:
        return
    terms = list(found.table[0]["terms"])
    first = found.table[0]
    table = Table(title="what each term did: held-out values at the end, and (change from 'all')")
    for column in ("run", "held-out loss", *terms, "time"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in found.table:
        cells = [_change(row["held_out/loss"], first["held_out/loss"])]
        cells += [_change(row["terms"].get(term), first["terms"].get(term)) for term in terms]
        table.add_row(row["run"], *cells, f"{row['seconds']:.1f} s")
    console = Console()
    console.width = max(console.width, 40 + 22 * len(terms))
    console.print(table)


def _change(value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    if first is None or value == first:
        return f"{value:.4g}"
    return f"{value:.4g} ({value - first:+.2g})"
