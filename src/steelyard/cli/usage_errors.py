"""Errors about unknown options list the options that the command has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup


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
