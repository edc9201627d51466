"""The commands that change a run while it goes on: `set`, `pause` and `continue`."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from steelyard.cli.trained_run import Run


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
    from steelyard.experiment import describe_settings, request_settings  # noqa: PLC0415 - takes seconds

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
    from steelyard.experiment import pause_run  # noqa: PLC0415 - takes seconds

    pause_run(run)
    typer.echo(f"{run} waits after its current step. Let it go on with:")
    typer.echo(f"  steelyard continue {shlex.quote(str(run))}")


def continue_(run: Run) -> None:
    """Let a paused run go on."""
    from steelyard.experiment import continue_run  # noqa: PLC0415 - takes seconds

    was_paused = continue_run(run)
    typer.echo(f"{run} goes on." if was_paused else f"{run} was not paused.")
