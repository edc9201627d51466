"""End of a command: exit codes, the message of a failure, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Self

from steelyard.errors import ConfigError, SteelyardError

FAILED = 1
BAD_USAGE = 2  # also what typer uses for wrong arguments
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def report_error(error: Exception) -> int:
    """Print an error to stderr, with secrets blanked out, and return the exit code.

    An error of Steelyard is its message, with its notes below, indented; any other error is a bug
    or comes from a user's code, and is printed with its traceback.
    """
    from steelyard.output.redaction import redact  # noqa: PLC0415 - takes seconds

    if isinstance(error, SteelyardError):
        notes = (textwrap.dedent(note) for note in getattr(error, "__notes__", ()))
        below = "".join(f"{textwrap.indent(note, '  ')}\n" for note in notes)
        message = f"{type(error).__name__}: {error}\n{below}"
    else:
        message = "".join(traceback.format_exception(error))
    sys.stderr.write(redact(message))
    return BAD_USAGE if isinstance(error, ConfigError) else FAILED


class Interruption:
    """Handle SIGINT inside a `with` block: the first sets a flag, the second ends the process.

    Args:
        on_first: called at the first Ctrl-C.
        on_second: called at the second, before the process ends.
    """

    def __init__(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        self._on_first, self._on_second = on_first, on_second
        self._requested = False

    def requested(self) -> bool:
        """Return whether Ctrl-C was pressed."""
        return self._requested

    def __enter__(self) -> Self:
        self._previous_handler = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def _handle(self, _: int, __: FrameType | None) -> None:
        if self._requested:
            self._on_second()
            # Not sys.exit: that raises SystemExit wherever the main thread is, which may be in
            # code that catches it, and the interpreter would then wait for its threads.
            os._exit(INTERRUPTED)
        self._requested = True
        # A handler runs between two bytecodes of the main thread. If that was writing to the same
        # stream, Python refuses the re-entrant write; the message is then lost, the flag is not.
        with contextlib.suppress(RuntimeError):
            self._on_first()
