"""The commands, and what they share: the version, Ctrl-C, exit codes, errors about options."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from steelyard._version import __version__
from steelyard.cli.compare import ablate, tune
from steelyard.cli.config import app as config
from steelyard.cli.demo import demo
from steelyard.cli.doctor import doctor
from steelyard.cli.engine import models_app as models
from steelyard.cli.engine import serve
from steelyard.cli.exit_codes import INTERRUPTED, report_error
from steelyard.cli.page import report, watch
from steelyard.cli.train import branch, continue_, pause, resume, set_, train
from steelyard.cli.trained_run import chat, export, sample


class CommandGroup(TyperGroup):
    """The commands; an unknown option of any of them is answered with those that it has."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the options that stand before the name of a command."""
        with _list_options():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse the arguments of a command, and run it."""
        with _list_options():
            return super().invoke(ctx)


@contextlib.contextmanager
def _list_options() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # `NoSuchOption` is a class of click or, in a newer typer, of a private module.
        if type(error).__name__ == "NoSuchOption":
            _add_options(error)
        raise


def _add_options(error: Any) -> None:
    # Almost any short word is near to --help.
    possible = [option for option in error.possibilities or () if option != "--help"]
    near = f"; did you mean {possible[0]}?" if possible else "."
    known = ", ".join(
        "/".join(parameter.opts)
        for parameter in error.ctx.command.get_params(error.ctx)
        if parameter.param_type_name == "option"
    )
    error.message = f"{error.message}{near} Options: {known}."
    error.possibilities = None


app = typer.Typer(
    name="steelyard",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train)
app.command("resume")(resume)
app.command("branch")(branch)
app.command("set")(set_)
app.command("pause")(pause)
app.command("continue")(continue_)
app.command("ablate")(ablate)
app.command("tune")(tune)
app.command("report")(report)
app.command("doctor")(doctor)
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
