"""The command `steelyard demo`: what it does, and what came out of it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.exit_codes import INTERRUPTED
from steelyard.cli.train import Overrides

if TYPE_CHECKING:
    from steelyard.experiment.demo.demo import Demo

_INTRODUCTION = """\
A small model learns to turn messages to a help desk into tickets such as
"TICKET | printer | room 12 | is broken". All else it should still answer as before.
It is trained three times, on the same messages:

  all    with a term, which is a second loss: here the KL divergence on other questions, a distance
         between what this model and the untrained one would say next. A bound says how far it may
         go; the weight of the term beside the first loss, that of the tickets, follows from it.
  none   without the term
  mixed  without the term, with the questions and the untrained model's answers in its data

This takes three to four minutes on two cores. Ctrl-C saves what is done.
"""
_NAMES = {
    "untrained": "untrained",
    "none": "trained plainly",
    "all": "with the term",
    "mixed": "questions mixed in",
}
_ANSWERS_OF = ("untrained", "none", "all")
_EXPLANATION = """\
loss: of tickets for new messages, in nats per token; 0 is certainty of the right one.
KL: from the untrained model, on questions that are in no data, in nats per token; 0 is no change.
With the questions mixed in, the model learns one answer to each of them, at a weight that nobody
chose. The term compares all that the two models could say at each word, and its bound says how far
the model may move."""


def demo(
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--run", "-r", help="Folder of the runs; default: runs/demo.")
    ] = None,
) -> None:
    """Train a small model with and without a term, and compare."""
    typer.echo(_INTRODUCTION)
    from steelyard.cli.display import run_with_display  # noqa: PLC0415 - takes seconds
    from steelyard.experiment.demo.demo import run_demo  # noqa: PLC0415 - as above

    folder = run or Path("runs") / "demo"
    result = run_with_display(
        lambda watch, stop: run_demo(folder, overrides or (), watch=watch, stop=stop)
    )
    if result.report is None:
        typer.echo(f"Stopped and saved. Run the same command again to continue: {folder}")
        raise typer.Exit(INTERRUPTED)
    _print_answers(result)
    _print_scores(result)
    program, shown = _program(), shlex.quote(str(folder))
    typer.echo(f"\nReport of the three runs: {result.report}")
    typer.echo("To try next:")
    for what, command in {
        "see the runs in a browser": f"watch {shown}",
        "talk to the model, beside the untrained one": f"chat {shown}/all --base",
        "loosen the bound": f"demo regularizers.keep.weight.at_most=0.5 --run {shown}-loose",
        "change it while that run is training": f"set {shown}-loose/all keep.at_most=0.02",
    }.items():
        typer.echo(f"  {what}: {program} {command}")


def _print_answers(result: Demo) -> None:
    typer.echo("\nQuestions that were in no data:")
    for question in result.answers["untrained"]:
        typer.echo(f"\n{question}")
        for model in _ANSWERS_OF:
            answer = " ".join(result.answers[model][question].split())
            typer.echo(f"  {_NAMES[model]:>15}: {answer or '(empty)'}")


def _print_scores(result: Demo) -> None:
    from rich.table import Table  # noqa: PLC0415 - takes a moment

    from steelyard.cli.display import print_table  # noqa: PLC0415 - as above
    from steelyard.experiment.demo.demo import held_out_questions  # noqa: PLC0415 - takes seconds

    count = len(held_out_questions())
    table = Table(title="on data that it was not trained on")
    table.add_column("")
    for column in (
        "loss of\nthe tickets",
        "KL on other\nquestions",
        "questions answered\nas a ticket",
    ):
        table.add_column(column, justify="right")
    for model, name in _NAMES.items():
        scores = result.scores[model]
        cells = (
            f"{scores.loss:.2f}",
            f"{scores.divergence:.2g}",
            f"{scores.as_tickets} of {count}",
        )
        table.add_row(name, *cells)
    typer.echo("")
    print_table(table)
    typer.echo(_EXPLANATION)


def _program() -> str:
    """The command as it can be typed: `make demo` runs one that is not on the search path."""
    started = Path(sys.argv[0])
    if shutil.which("steelyard") or started.name != "steelyard":
        return "steelyard"
    return shlex.quote(str(started))
