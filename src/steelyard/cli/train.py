"""`steelyard train` and `steelyard resume`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.interruption import INTERRUPTED

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides: train.steps=5")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave malformed lines of data out.")]


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="The run folder; runs/<config>-<time>.")
    ] = None,
    skip_bad: SkipBad = False,
) -> None:
    """Train, as a config says."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import fresh_folder, watched  # noqa: PLC0415 - as above

    chosen = [*(overrides or ()), *(["data.skip_bad=true"] if skip_bad else ())]
    read = experiment.read_config(config, chosen)
    folder = run or fresh_folder(config)
    _end(watched(lambda watch, stop: experiment.train(read, folder, watch=watch, stop=stop)))


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
) -> None:
    """Go on with a run from its last checkpoint."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import watched  # noqa: PLC0415 - as above

    _end(watched(lambda watch, stop: experiment.resume(run, watch=watch, stop=stop)))


def _end(outcome: object) -> None:
    from steelyard.experiment import Outcome, RunFolder  # noqa: PLC0415 - takes seconds

    assert isinstance(outcome, Outcome)  # noqa: S101 - for the type checker
    if outcome.status == "interrupted":
        typer.echo(f"Stopped after {outcome.steps} steps, and saved. Go on with:")
        typer.echo(f"  steelyard resume {shlex.quote(str(outcome.folder))}")
        raise typer.Exit(INTERRUPTED)
    lines = RunFolder(outcome.folder).metrics()
    held = [line["held_out/loss"] for line in lines if "held_out/loss" in line]
    if held:
        typer.echo(f"Held-out loss: {held[0]:.4f} -> {held[-1]:.4f}.")
    typer.echo(f"Done: {outcome.steps} steps in {outcome.folder}")
