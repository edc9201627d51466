"""The command `steelyard demo`: a small training run with a report."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.exit_codes import INTERRUPTED
from steelyard.cli.train import Overrides


def demo(
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="Run folder; default: runs/demo-<time>.")
    ] = None,
) -> None:
    """Train a small model with five regularizers and write a report."""
    from steelyard.cli.display import (  # noqa: PLC0415 - takes seconds
        default_run_folder,
        run_with_display,
    )
    from steelyard.experiment.demo import run_demo  # noqa: PLC0415 - as above

    folder = run or default_run_folder(Path("demo"))
    result = run_with_display(
        lambda watch, stop: run_demo(folder, overrides or (), watch=watch, stop=stop)
    )
    if result.summary:
        typer.echo("\n" + "\n".join(result.summary))
    _print_samples(folder)
    if result.report is not None:
        typer.echo(f"\nReport: {result.report}")
    if result.outcome.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    program = _program()
    typer.echo(f"See its curves in a browser: {program} watch {shlex.quote(str(folder.parent))}")
    typer.echo(f"Talk to the model: {program} chat {shlex.quote(str(folder))} --base")


def _program() -> str:
    """The command as it can be typed: `make demo` runs one that is not on the search path."""
    started = Path(sys.argv[0])
    if shutil.which("steelyard") or started.name != "steelyard":
        return "steelyard"
    return shlex.quote(str(started))


def _print_samples(folder: Path) -> None:
    from steelyard.experiment import RunFolder  # noqa: PLC0415 - takes seconds

    samples = RunFolder(folder).samples()
    for prompt in dict.fromkeys(sample["prompt"] for sample in samples):
        typer.echo(f"\n{prompt}")
        for sample in samples:
            if sample["prompt"] == prompt:
                answer = " ".join(sample["completion"].split())
                typer.echo(f"  {sample['when']:>6}: {answer or '(empty)'}")
