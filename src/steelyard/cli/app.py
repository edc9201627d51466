"""List of the commands, and what they share: the version, Ctrl-C and exit codes.

Exit codes: 0 done, 1 failed, 2 bad usage or config, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from steelyard._version import __version__
from steelyard.cli.ablate import ablate
from steelyard.cli.change import continue_, pause, set_
from steelyard.cli.chat import chat
from steelyard.cli.config import app as config
from steelyard.cli.demo import demo
from steelyard.cli.exit_codes import INTERRUPTED, report_error
from steelyard.cli.export import export
from steelyard.cli.models import app as models
from steelyard.cli.report import report
from steelyard.cli.sample import sample
from steelyard.cli.serve import serve
from steelyard.cli.train import resume, train
from steelyard.cli.tune import tune
from steelyard.cli.usage_errors import CommandGroup
from steelyard.cli.watch import watch

app = typer.Typer(
    name="steelyard",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train)
app.command("resume")(resume)
app.command("set")(set_)
app.command("pause")(pause)
app.command("continue")(continue_)
app.command("ablate")(ablate)
app.command("tune")(tune)
app.command("report")(report)
app.command("chat")(chat)
app.command("sample")(sample)
app.command("export")(export)
app.command("watch")(watch)
app.command("demo")(demo)
app.command("serve")(serve)
app.add_typer(config, name="config")
app.add_typer(models, name="models")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"steelyard {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version),
]


@app.callback()
def _common(version: Version = False) -> None:
    """Fine-tune language models with named, weighted regularizers."""


def main() -> None:
    """Run the command named in the arguments, and exit."""
    signal.signal(signal.SIGINT, _quit)
    try:
        app()
    except Exception as error:  # noqa: BLE001 - any error is printed with secrets blanked out
        sys.exit(report_error(error))


def _quit(*_: object) -> None:
    raise SystemExit(INTERRUPTED)
