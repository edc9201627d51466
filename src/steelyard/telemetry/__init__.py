"""Telemetry: an event bus, the events of the library, and a logging handler.

An event is a dotted name with measurements (numbers) and metadata (what they belong to).
`events` lists the events that the library emits; users can emit their own.
Durations are in seconds.
"""

from steelyard.telemetry import events
from steelyard.telemetry.bus import (
    Handler,
    attach,
    attach_logger,
    attach_many,
    detach,
    execute,
    list_handlers,
)

__all__ = [
    "Handler",
    "attach",
    "attach_logger",
    "attach_many",
    "detach",
    "events",
    "execute",
    "list_handlers",
]
