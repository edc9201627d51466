"""From an error to a line for people and an exit code for programs."""

from __future__ import annotations

import sys
import traceback

from steelyard.errors import ConfigError, SteelyardError

FAILED, MISUSED = 1, 2


def report(error: Exception) -> int:
    """Print what went wrong, with a traceback if it is no error of ours; the exit code."""
    from steelyard.experiment import redact  # noqa: PLC0415 - takes seconds

    if isinstance(error, SteelyardError):
        said = f"{type(error).__name__}: {error}\n"
    else:
        said = "".join(traceback.format_exception(error))
    sys.stderr.write(redact(said))
    return MISUSED if isinstance(error, ConfigError) else FAILED
