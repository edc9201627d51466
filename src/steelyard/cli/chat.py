"""The command `steelyard chat`: a conversation with a trained model, on a terminal or a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.exit_codes import report_error
from steelyard.cli.trained_run import (
    BaseUrl,
    Checkpoint,
    MaxTokens,
    Run,
    Seed,
    Step,
    System,
    Temperature,
    TopP,
    chosen_checkpoint,
    opened_model,
    printable,
)
from steelyard.errors import SteelyardError

if TYPE_CHECKING:
    from steelyard.experiment import Chat

_HELP = "Ctrl-C ends an answer, Ctrl-D the chat; /new starts another one."
_PROMPT = "> "


def chat(
    run: Run,
    base: Annotated[
        bool, typer.Option("--base", help="Let the untrained model answer beside the trained one.")
    ] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: System = None,
    step: Step = None,
    checkpoint: Checkpoint = None,
    base_url: BaseUrl = None,
) -> None:
    """Talk with the model of a run; from a pipe, answer each line."""
    from steelyard.experiment import Chat  # noqa: PLC0415 - takes seconds

    with opened_model(run, chosen_checkpoint(step, checkpoint), base_url) as model:
        params = model.params(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
        chats = [
            Chat(model, params, system=system, base=each) for each in (False, True)[: 1 + base]
        ]
        if not model.has_chat_template and system is None:
            typer.echo("No chat template: each line is continued as plain text.", err=True)
        _converse(chats)


def _converse(chats: Sequence[Chat]) -> None:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    side_by_side = _show_columns if is_terminal else _show_in_turn
    show: Callable[[Sequence[Iterator[str]]], None] = (
        side_by_side if len(chats) > 1 else _show_stream
    )
    if is_terminal:
        import readline  # noqa: F401, PLC0415 - gives input() a history and editing

        typer.echo(_HELP)
    # Ctrl-C must raise KeyboardInterrupt here: the command's own handler would end the process.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for text in _typed_lines() if is_terminal else sys.stdin:
            if text.strip() == "/new":
                for each in chats:
                    each.reset()
            elif text.strip():
                with _reported(is_terminal):
                    _answer(chats, text.strip(), show)
    except KeyboardInterrupt:
        typer.echo()
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def _reported(is_terminal: bool) -> Iterator[None]:
    """Let a person go on after an error, such as a text that is too long."""
    try:
        yield
    except SteelyardError as error:
        if not is_terminal:
            raise
        report_error(error)


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(EOFError):
        while True:
            yield input(_PROMPT)


def _answer(
    chats: Sequence[Chat], text: str, show: Callable[[Sequence[Iterator[str]]], None]
) -> None:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(contextlib.closing(each.answer(text))) for each in chats]
        try:
            show(streams)
        except KeyboardInterrupt:
            typer.echo(" [stopped]")


def _show_stream(streams: Sequence[Iterator[str]]) -> None:
    for piece in streams[0]:
        typer.echo(printable(piece), nl=False)
        sys.stdout.flush()
    typer.echo()


def _show_in_turn(streams: Sequence[Iterator[str]]) -> None:
    for name, stream in zip(("trained", "base"), streams, strict=True):
        typer.echo(f"{name}: {printable(''.join(stream))}")


def _show_columns(streams: Sequence[Iterator[str]]) -> None:
    from rich.live import Live  # noqa: PLC0415 - only on a terminal
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    answers = ["", ""]

    def columns() -> Table:
        table = Table("trained", "base", expand=True)
        table.add_row(*map(Text, answers))
        return table

    # The live table may be cut at the terminal's height; the last one is printed whole.
    with Live(columns(), transient=True, vertical_overflow="ellipsis") as live:
        try:
            open_streams = dict(enumerate(streams))
            while open_streams:
                for index, stream in list(open_streams.items()):
                    piece = next(stream, None)
                    if piece is None:
                        del open_streams[index]
                    else:
                        answers[index] += printable(piece)
                live.update(columns())
        finally:
            live.stop()
            live.console.print(columns())
