"""The command `steelyard doctor`, and how a finding is shown on a terminal."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.exit_codes import FAILED
from steelyard.errors import RunError

if TYPE_CHECKING:
    from steelyard.experiment.run.health import RunHealth

COLORS = {"information": "cyan", "warning": "yellow", "problem": "red"}


def doctor(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or of several runs.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list with an object for each run.")
    ] = False,
) -> None:
    """Say what is wrong with a run: evidence, cause and cure."""
    from steelyard.experiment.run.health import examine  # noqa: PLC0415 - takes seconds

    runs = examine(run)
    if as_json:
        typer.echo(json.dumps([health.to_dict() for health in runs], indent=2))
    else:
        typer.echo("\n\n".join(map(_describe, runs)))
    if any(health.has_problem for health in runs):
        raise typer.Exit(FAILED)


def _describe(health: RunHealth) -> str:
    steps = f"{health.steps} step{'' if health.steps == 1 else 's'}"
    lasting = [finding for finding in health.findings if finding.ended is None]
    ended = [finding for finding in health.findings if finding.ended is not None]
    blocks = [f"{health.folder}: {steps}{'' if health.findings else ', no findings'}"]
    for finding in lasting:
        severity = typer.style(finding.severity, fg=COLORS[finding.severity], bold=True)
        lines = [f"{severity}, since step {finding.step}: {finding.what}"]
        parts = {"evidence": finding.evidence, "cause": finding.cause, "cure": finding.cure}
        lines += [f"  {name}: {text}" for name, text in parts.items() if text]
        blocks.append("\n".join(lines))
    blocks += [finding.text for finding in ended]
    return "\n".join(blocks)


def name_problems(folder: Path) -> None:
    """Print which runs of a folder end with problems, and the command that says what to change."""
    from steelyard.experiment.run.health import examine  # noqa: PLC0415 - takes seconds

    try:
        sick = [health for health in examine(folder) if health.has_problem]
    except RunError:  # no run has begun, or one is damaged, which is said where it is read
        return
    if not sick:
        return
    typer.echo(f"With problems (steelyard doctor {shlex.quote(str(folder))} says what to change):")
    for health in sick:
        name = "" if health.folder == folder else f"{health.folder.relative_to(folder)}: "
        typer.echo(f"  {name}{', '.join(health.problems)}")
