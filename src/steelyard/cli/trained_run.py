"""Options of the commands that use a trained model, and how they open the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steelyard.cli.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from steelyard.experiment import TrainedModel

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]
Step = Annotated[
    int | None,
    typer.Option("--step", min=0, help="Checkpoint after this many steps; default: the last."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", help="best (by train.keep_best), last, or a number of steps."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="0: the likeliest token.")]
TopP = Annotated[
    float, typer.Option("--top-p", help="Share of the probability that tokens are drawn from.")
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Seed of the answers; default: another each time.")
]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        help="Address of the Tinker service; needed once for a run of another machine.",
    ),
]
System = Annotated[str | None, typer.Option("--system", help="System message of the chat.")]


# A model may write any character; on a terminal, control characters are commands.
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "�")
_CONTROL |= {ord(kept): kept for kept in "\n\t"}


def printable(text: str) -> str:
    """Text of a model without control characters, but for newlines and tabs."""
    return text.translate(_CONTROL)


def chosen_checkpoint(step: int | None, checkpoint: str | None) -> int | Literal["best"] | None:
    """Checkpoint that `--step` or `--checkpoint` names; None is the last one."""
    if checkpoint is None:
        return step
    if step is not None:
        raise typer.BadParameter("give --step or --checkpoint, not both.")
    if checkpoint == "best":
        return "best"
    if checkpoint == "last":
        return None
    if not checkpoint.isdecimal():
        raise typer.BadParameter(
            f"--checkpoint must be best, last or a number of steps, got {checkpoint!r}."
        )
    return int(checkpoint)


@contextmanager
def opened_model(
    run: Path, step: int | Literal["best"] | None, base_url: str | None
) -> Iterator[TrainedModel]:
    """Open the model of a run, and say on stderr which checkpoint it is."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    from steelyard.experiment import open_trained_model  # noqa: PLC0415 - as above

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    with open_trained_model(run, step, base_url=base_url) as model:
        steps = model.config.train.steps
        note = describe_checkpoint(model.checkpoint.step, steps, is_finished=model.is_finished)
        typer.echo(f"{model.config.model.base_model}, {note}", err=True)
        try:
            yield model
        except SystemExit:  # Ctrl-C: closing the model would first finish what it is sampling
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)


def describe_checkpoint(step: int, steps: int, *, is_finished: bool) -> str:
    """Words about the checkpoint after `step` of `steps` steps."""
    note = f"trained for {step} of {steps} steps"
    return note if is_finished else f"{note}: the run is not finished, this is a checkpoint of it"
