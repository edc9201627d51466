"""A handler that writes the library's events to Python's logging."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from steelyard.errors import TelemetryError
from steelyard.telemetry import events
from steelyard.telemetry.bus import Payload, attach_many

_log = logging.getLogger("steelyard")
_numbers = itertools.count(1)


def attach_logger(level: str | int = "INFO", handler_id: str | None = None) -> str:
    """Log what happens, each event a line, to the logger `"steelyard"`. Returns the handler's id.

    Finished and failed work is logged at `level` (failures at least as a warning), starts
    at DEBUG.

    Raises:
        TelemetryError: the level is unknown, or the id is taken.

    Example:
        >>> from steelyard import telemetry
        >>> telemetry.attach_logger("DEBUG", handler_id="my-log")
        'my-log'
        >>> telemetry.detach("my-log")
        True
    """
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if not isinstance(number, int) or isinstance(number, bool):
        known = ", ".join(logging.getLevelNamesMapping())
        raise TelemetryError(f"level must be one of {known}, got {level!r}.")
    handler_id = handler_id or f"steelyard-logger-{next(_numbers)}"
    attach_many(handler_id, events.ALL, _write, number)
    return handler_id


def _write(event: str, measurements: Payload, metadata: Payload, level: int) -> None:
    if event.endswith(".start"):
        level = logging.DEBUG
    elif event.endswith(".exception"):
        level = max(level, logging.WARNING)
    if _log.isEnabledFor(level):
        facts = {**metadata, **measurements}
        facts.pop("system_time", None)
        line = " ".join(f"{name}={_show(value)}" for name, value in facts.items())
        _log.log(level, "%s %s", event, line)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
