"""`steelyard tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.interruption import INTERRUPTED
from steelyard.cli.train import Overrides, SkipBad


def tune(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="The folder of the study; goes on there.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="How many in all; tune.trials.")
    ] = None,
    skip_bad: SkipBad = False,
) -> None:
    """Search for the weights that a config leaves open."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import watched  # noqa: PLC0415 - as above

    chosen = [*(overrides or ()), *(["data.skip_bad=true"] if skip_bad else ())]
    chosen += [] if trials is None else [f"tune.trials={trials}"]
    read = experiment.read_config(config, chosen)
    folder = run or Path("runs") / f"{config.stem}-tune"
    found = watched(lambda watch, stop: experiment.tune(read, folder, watch=watch, stop=stop))
    if found.value is not None:
        typer.echo(f"Best of {found.trials} trials: {found.value:.6g}")
        for name, weight in found.weights.items():
            typer.echo(f"  {name}: weight = {weight:.6g}")
        typer.echo(f"Train with it: steelyard train {found.config}")
    if not found.done:
        typer.echo(f"Stopped after {found.trials} trials. The same command goes on: {found.folder}")
        raise typer.Exit(INTERRUPTED)
