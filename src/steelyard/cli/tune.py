"""The command `steelyard tune`: search for weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.exit_codes import INTERRUPTED
from steelyard.cli.train import Overrides, SkipBad


def tune(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", "-r", help="Folder of the study; an existing one is continued."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Number of trials in total; overrides tune.trials."),
    ] = None,
    skip_bad: SkipBad = False,
) -> None:
    """Search for the weights written as { tune = [low, high] }."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import run_with_display  # noqa: PLC0415 - as above

    settings = [*(overrides or ()), *(["data.skip_bad=true"] if skip_bad else ())]
    settings += [] if trials is None else [f"tune.trials={trials}"]
    parsed = experiment.read_config(config, settings)
    folder = run or Path("runs") / f"{config.stem}-tune"
    tuned = run_with_display(
        lambda watch, stop: experiment.tune(parsed, folder, watch=watch, stop=stop)
    )
    if tuned.value is not None:
        typer.echo(f"Best of {tuned.trials} trials: {tuned.value:.6g}")
        for name, weight in tuned.weights.items():
            typer.echo(f"  {name}: weight = {weight:.6g}")
        typer.echo(f"Train with it: steelyard train {tuned.config}")
    if not tuned.done:
        typer.echo(f"Stopped after {tuned.trials} trials. Run the same command again to continue:")
        typer.echo(f"  {tuned.folder}")
        raise typer.Exit(INTERRUPTED)
