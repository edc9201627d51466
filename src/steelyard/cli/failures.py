"""From an error to a line for people and an exit code for programs."""

from __future__ import annotations

import sys

from steelyard.errors import ConfigError, SteelyardError

FAILED, MISUSED = 1, 2


def report(error: SteelyardError) -> int:
    """Print what went wrong; the exit code."""
    from steelyard.experiment.secrets import redact  # noqa: PLC0415 - takes seconds

    sys.stderr.write(f"{type(error).__name__}: {redact(str(error))}\n")
    return MISUSED if isinstance(error, ConfigError) else FAILED
