"""Exit codes, and the message that goes to stderr with a failure."""

from __future__ import annotations

import sys
import traceback

from steelyard.errors import ConfigError, SteelyardError

FAILED = 1
BAD_USAGE = 2  # also what typer uses for wrong arguments
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def report_error(error: Exception) -> int:
    """Print an error to stderr, with secrets blanked out, and return the exit code.

    An error of Steelyard is one line; any other error is a bug or comes from a user's code, and
    is printed with its traceback.
    """
    from steelyard.experiment import redact  # noqa: PLC0415 - takes seconds

    if isinstance(error, SteelyardError):
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        message = f"{type(error).__name__}: {error}{notes}\n"
    else:
        message = "".join(traceback.format_exception(error))
    sys.stderr.write(redact(message))
    return BAD_USAGE if isinstance(error, ConfigError) else FAILED
