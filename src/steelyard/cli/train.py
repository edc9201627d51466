"""Commands that train (`train`, `resume`, `branch`), `set`, `pause` and `continue`."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.doctor import name_problems
from steelyard.cli.exit_codes import INTERRUPTED
from steelyard.cli.page import Watch, page_of_run

if TYPE_CHECKING:
    from steelyard.experiment.training.loop import Outcome

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
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        help="Address of the Tinker service; needed once for a run of another machine.",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out malformed lines of the data.")]


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML, YAML or JSON file.")],
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            "-r",
            help="Run folder; default: runs/<config>-<time>, or runs/<config>-baseline.",
        ),
    ] = None,
    skip_bad: SkipBad = False,
    watch: Watch = False,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline",
            help="Also train without the regularizers, in the same folder, and say what they "
            "changed.",
        ),
    ] = False,
    seeds: Seeds = 1,
) -> None:
    """Train a model as described in a config file."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.compare import train_with_baseline  # noqa: PLC0415 - it imports this module
    from steelyard.cli.display import default_run_folder, run_with_display  # noqa: PLC0415 - as above

    if seeds > 1 and not baseline:
        raise typer.BadParameter("--seeds is for a comparison: give --baseline too, or ablate.")
    parsed = experiment.read_config(config, overrides or (), skip_bad=skip_bad)
    if baseline:
        folder = run or Path("runs") / f"{config.stem}-baseline"
        with page_of_run(None, folder) if watch else contextlib.nullcontext():
            train_with_baseline(parsed, folder, seeds)
        return
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


def branch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run to go on from.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Other settings from there on: what 'steelyard set' takes, train.steps, and "
            "secrets that stood in the config itself.",
        ),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option("--at", min=1, help="Steps after which the checkpoint was saved."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--run", "-r", help="New run folder; default: <RUN>-at-<STEP>, beside it."),
    ] = None,
    base_url: BaseUrl = None,
    watch: Watch = False,
) -> None:
    """Start a new run at a checkpoint of another one."""
    from steelyard import experiment  # noqa: PLC0415 - takes seconds
    from steelyard.cli.display import run_with_display  # noqa: PLC0415 - as above
    from steelyard.experiment.run.branches import make_branch  # noqa: PLC0415 - as above
    from steelyard.experiment.run.checkpoints import find_checkpoint  # noqa: PLC0415 - as above

    step = find_checkpoint(experiment.RunFolder(run)).step if at is None else at
    new = make_branch(run, step, settings or (), folder)
    typer.echo(f"{new.folder} goes on from step {step} of {run}.")
    with page_of_run(new.folder, new.folder.parent) if watch else contextlib.nullcontext():
        outcome = run_with_display(
            lambda watcher, stop: experiment.resume(
                new.folder, new.secrets, base_url=base_url, watch=watcher, stop=stop
            )
        )
    _print_outcome(outcome)


def _print_outcome(outcome: Outcome) -> None:
    from steelyard.experiment.run.folder import RunFolder  # noqa: PLC0415 - takes seconds

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
    name_problems(outcome.folder)


def set_(
    run: Run,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="New settings: kl.weight=0.2, kl.at_most=0.1, kl.enabled=false, "
            "rewards.short.weight=2 or learning_rate=1e-5; without any, the current ones are "
            "shown.",
        ),
    ] = None,
) -> None:
    """Change weights or the learning rate of a running run."""
    from steelyard.experiment.run.changes import describe_settings, request_settings  # noqa: PLC0415 - takes seconds

    if not settings:
        for key, value in describe_settings(run).items():
            typer.echo(f"{key} = {value}")
        return
    taken, is_running = request_settings(run, settings)
    when = "the next step on" if is_running else "its next step on, when it is resumed"
    for key, value in taken.items():
        typer.echo(f"{key} = {value}, from {when}")


def pause(run: Run) -> None:
    """Let a run wait after its current step."""
    from steelyard.experiment.run.changes import pause_run  # noqa: PLC0415 - takes seconds

    pause_run(run)
    typer.echo(f"{run} waits after its current step. Let it go on with:")
    typer.echo(f"  steelyard continue {shlex.quote(str(run))}")


def continue_(run: Run) -> None:
    """Let a paused run go on."""
    from steelyard.experiment.run.changes import continue_run  # noqa: PLC0415 - takes seconds

    was_paused = continue_run(run)
    typer.echo(f"{run} goes on." if was_paused else f"{run} was not paused.")
