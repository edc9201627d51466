"""`steelyard demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.interruption import INTERRUPTED
from steelyard.cli.train import Overrides


def demo(
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="The run folder; runs/demo-<time>.")
    ] = None,
) -> None:
    """Train a small model with five terms of five kinds, and write a report."""
    from steelyard.cli.display import fresh_folder, watched  # noqa: PLC0415 - takes seconds
    from steelyard.experiment.demo import run_demo  # noqa: PLC0415 - as above

    folder = run or fresh_folder(Path("demo"))
    done = watched(lambda watch, stop: run_demo(folder, overrides or (), watch=watch, stop=stop))
    if done.summary:
        typer.echo("\n" + "\n".join(done.summary))
    _show_samples(folder / "samples.jsonl")
    if done.report is not None:
        typer.echo(f"\nReport: {done.report}")
    if done.outcome.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _show_samples(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    samples = [json.loads(line) for line in lines]
    for prompt in dict.fromkeys(sample["prompt"] for sample in samples):
        typer.echo(f"\n{prompt}")
        for sample in samples:
            if sample["prompt"] == prompt:
                answer = " ".join(sample["completion"].split())
                typer.echo(f"  {sample['when']:>6}: {answer or '(nothing)'}")
