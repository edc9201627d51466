"""Who hears about it: an event bus, the events, and a logging sink.

An event is a dotted name with measurements (numbers) and metadata (what they belong to).
`events` lists every event the library emits; anybody may emit events of their own.
Durations are in seconds.
"""

from steelyard.telemetry import events
from steelyard.telemetry.bus import (
    Handler,
    attach,
    attach_many,
    detach,
    execute,
    list_handlers,
    listening,
)
from steelyard.telemetry.logger import attach_logger

__all__ = [
    "Handler",
    "attach",
    "attach_logger",
    "attach_many",
    "detach",
    "events",
    "execute",
    "list_handlers",
    "listening",
]
