"""The commands `steelyard chat`, `sample` and `export`: what is done with a trained model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from steelyard.cli.exit_codes import INTERRUPTED, report_error
from steelyard.cli.train import BaseUrl, Run, SkipBad
from steelyard.errors import SteelyardError

if TYPE_CHECKING:
    from steelyard.experiment.model.trained_model import Chat, TrainedModel


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

    from steelyard.experiment.model.trained_model import open_trained_model  # noqa: PLC0415 - as above

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


def export(
    run: Run,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder to write; new or empty.")
    ],
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Write a whole model, with the adapter added to its weights."),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Of a whole model: bfloat16, float16, float32; default: the run's."
        ),
    ] = None,
    step: Step = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Write the model of a run for other libraries."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    from steelyard.experiment.model.trained_model import export_run  # noqa: PLC0415 - as above

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    chosen = chosen_checkpoint(step, checkpoint)
    written, record = export_run(run, folder, merge=merge, step=chosen, dtype=dtype)
    kind = "Model" if merge else "Adapter"
    typer.echo(f"{kind} after {record.step} steps: {written}")


_HELP = "Ctrl-C ends an answer, Ctrl-D or /quit the chat; /new starts another one."
_PROMPT = "> "
# A line that begins with one is not for the model.
_CHAT_COMMANDS = {
    "/help": "help", "/?": "help", "/new": "new", "/reset": "new", "/clear": "new",
    "/quit": "quit", "/exit": "quit", "/bye": "quit",
}  # fmt: skip
_COMMAND = re.compile(r"/([A-Za-z]+|\?)(?=\s|$)")


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
    from steelyard.experiment.model.trained_model import Chat  # noqa: PLC0415 - takes seconds

    with opened_model(run, chosen_checkpoint(step, checkpoint), base_url) as model:
        params = model.params(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
        chats = [
            Chat(model, params, system=system, base=is_base)
            for is_base in (False, True)[: 1 + base]
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
            if written := _COMMAND.match(text):
                if not _obey(written[0], chats):
                    break
            elif text.strip():
                with _reported(is_terminal):
                    _answer(chats, text.strip(), show)
    except KeyboardInterrupt:
        typer.echo()
    finally:
        signal.signal(signal.SIGINT, previous)


def _obey(written: str, chats: Sequence[Chat]) -> bool:
    """Do what a command in a chat says; return whether the chat goes on."""
    command = _CHAT_COMMANDS.get(written.lower())
    if command == "new":
        for chat in chats:
            chat.reset()
    elif command == "help":
        typer.echo(_HELP, err=True)
    elif command is None:
        typer.echo(
            f"{written} is no command; there are /help, /new and /quit. A space before it sends "
            f"the line to the model.",
            err=True,
        )
    return command != "quit"


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
        streams = [stack.enter_context(contextlib.closing(chat.answer(text))) for chat in chats]
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


def sample(
    run: Run,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help='Prompts: one a line, or JSON Lines with "prompt" or "messages"; -: stdin.',
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="Answers to each prompt.")] = 1,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: System = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--plain",
            help="Whether a prompt is a message of a chat or a text to continue; default: as in "
            "the run's data.",
        ),
    ] = None,
    base: Annotated[
        bool, typer.Option("--base", help="Show the base model's answers too.")
    ] = False,
    step: Step = None,
    checkpoint: Checkpoint = None,
    base_url: BaseUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON Lines.")] = False,
    skip_bad: SkipBad = False,
) -> None:
    """Answer prompts with the model of a run."""
    texts = _read_prompts(prompt or [], file, skip_bad=skip_bad)
    if system is not None and (chat is False or any(not isinstance(text, str) for text in texts)):
        raise typer.BadParameter(
            "--system must be given with texts that are messages of a chat, not with --plain; in a "
            'file of JSON Lines, write it into the "messages" of each line.'
        )
    with opened_model(run, chosen_checkpoint(step, checkpoint), base_url) as model:
        is_chat = model.is_chat if chat is None else chat
        prompts = [_record(text, system, is_chat=is_chat or system is not None) for text in texts]
        params = model.params(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
        answers_of = {"trained": model.sample(prompts, params, count=count)}
        if base:
            answers_of["base"] = model.sample(prompts, params, count=count, base=True)
        rows = [
            {
                **given,
                **({"model": name} if base else {}),
                "step": model.checkpoint.step if name == "trained" else 0,
                "sample": number,
                "completion": answer.text,
                "stop_reason": answer.stop_reason,
                "tokens": answer.tokens,
            }
            for index, given in enumerate(prompts)
            for name, answers in answers_of.items()
            for number, answer in enumerate(answers[index])
        ]
    for row in rows:
        typer.echo(json.dumps(row, ensure_ascii=False) if as_json else _text(row, len(rows)))


def _read_prompts(
    texts: list[str], file: Path | None, *, skip_bad: bool
) -> list[Mapping[str, Any] | str]:
    from steelyard.experiment.model.trained_model import read_open_prompts  # noqa: PLC0415 - takes seconds

    if not texts and file is None:
        raise typer.BadParameter("give --prompt TEXT or --file FILE.")
    if any(not text.strip() for text in texts):
        raise typer.BadParameter("--prompt must be a text, and it is empty.")
    prompts: list[Mapping[str, Any] | str] = list(texts)
    if file is not None:
        of_file, skipped = read_open_prompts(
            "/dev/stdin" if str(file) == "-" else file, skip_bad=skip_bad
        )
        for error in skipped:
            typer.echo(f"left out: {error}", err=True)
        prompts += of_file
    return prompts


def _record(
    prompt: Mapping[str, Any] | str, system: str | None, *, is_chat: bool
) -> Mapping[str, Any]:
    if not isinstance(prompt, str):
        return prompt
    if not is_chat:
        return {"prompt": prompt}
    before = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*before, {"role": "user", "content": prompt}]}


def _text(row: Mapping[str, Any], count: int) -> str:
    if count == 1:
        return printable(row["completion"])
    question = row["messages"][-1]["content"] if "messages" in row else row["prompt"]
    heading = f"{question} [{row['sample'] + 1}]"
    if "model" in row:
        heading += f" ({row['model']})"
    return printable(f"> {heading}\n{row['completion']}\n")
