"""The commands `steelyard train` and `steelyard resume`."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.exit_codes import INTERRUPTED
from steelyard.cli.trained_run import BaseUrl
from steelyard.cli.watch import Watch, page_of_run

if TYPE_CHECKING:
    from steelyard.experiment import Outcome

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to override, such as train.steps=5."),
]
Seeds = Annotated[
    int,
    typer.Option(
        "--seeds", min=1, help="Number of seeds to train with: train.seed and those after it."
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out malformed lines of the data.")]


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="Run folder; default: runs/<config>-<time>.")
    ] = None,
    skip_bad: SkipBad = False,
    watch: Watch = False,
) -> None:
    """Train a model as described in a config file."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import default_run_folder, run_with_display  # noqa: PLC0415 - as above

    parsed = experiment.read_config(config, overrides or (), skip_bad=skip_bad)
    folder = run or default_run_folder(config)
    # The page lists all runs of the default folder, and only this one in a folder of its own.
    with page_of_run(folder, run or folder.parent) if watch else contextlib.nullcontext():
        outcome = run_with_display(
            lambda watcher, stop: experiment.train(parsed, folder, watch=watcher, stop=stop)
        )
    _print_outcome(outcome)


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    secrets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Secrets that stood in the config itself; - reads such lines from stdin.",
        ),
    ] = None,
    base_url: BaseUrl = None,
    watch: Watch = False,
) -> None:
    """Continue a run from its last checkpoint."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import run_with_display  # noqa: PLC0415 - as above

    lines = [line for line in sys.stdin.read().split("\n") if line] if secrets == ["-"] else secrets
    with page_of_run(run, run) if watch else contextlib.nullcontext():
        outcome = run_with_display(
            lambda watcher, stop: experiment.resume(
                run, lines or (), base_url=base_url, watch=watcher, stop=stop
            )
        )
    _print_outcome(outcome)


def _print_outcome(outcome: Outcome) -> None:
    from steelyard.experiment import RunFolder  # noqa: PLC0415 - takes seconds

    if outcome.status == "interrupted":
        typer.echo(f"Stopped after {outcome.steps} steps, and saved. Continue with:")
        typer.echo(f"  steelyard resume {shlex.quote(str(outcome.folder))}")
        raise typer.Exit(INTERRUPTED)
    rows = RunFolder(outcome.folder).metrics()
    for quantity in ("loss", "reward"):
        values = [row[key] for row in rows if (key := f"held_out/{quantity}") in row]
        if values:
            typer.echo(f"Held-out {quantity}: {values[0]:.4f} -> {values[-1]:.4f}.")
    typer.echo(f"Done: {outcome.steps} steps in {outcome.folder}")
