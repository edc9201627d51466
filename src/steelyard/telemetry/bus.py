"""The event bus: handlers by event, `execute`, which calls them, and a handler that logs."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from steelyard.errors import TelemetryError
from steelyard.telemetry import events

# What an event carries is the emitter's business, hence Any.
Payload: TypeAlias = Mapping[str, Any]
HandlerFn: TypeAlias = Callable[[str, Payload, Payload, Any], object]

_log = logging.getLogger("steelyard.telemetry")
_lock = threading.Lock()
# Replaced, never changed in place, so that `execute` may read it without the lock.
_handlers: dict[str, tuple[Handler, ...]] = {}


@dataclass(frozen=True)
class Handler:
    """One attached function: `fn(event, measurements, metadata, config)`."""

    handler_id: str
    event: str
    fn: HandlerFn
    config: Any = None


def attach(handler_id: str, event: str, fn: HandlerFn, config: Any = None) -> None:
    """Call `fn(event, measurements, metadata, config)` whenever `event` happens.

    The handler runs in the thread that emits the event, so keep it short. One that raises
    is detached and logged once; the error never reaches training.

    Raises:
        TelemetryError: the id is empty or taken, or `fn` cannot be called.

    Example:
        >>> from steelyard import telemetry
        >>> seen = []
        >>> telemetry.attach("doc", "my.event", lambda e, m, meta, config: seen.append(m))
        >>> telemetry.execute("my.event", {"value": 1.0})
        >>> seen, telemetry.detach("doc")
        ([{'value': 1.0}], True)
    """
    attach_many(handler_id, [event], fn, config)


def attach_many(handler_id: str, events: Iterable[str], fn: HandlerFn, config: Any = None) -> None:
    """Attach one handler to several events, under one id.

    Raises:
        TelemetryError: the id is empty or taken, an event is not a name, or `fn` cannot
            be called.
    """
    global _handlers  # noqa: PLW0603 - see the note beside it
    events = [events] if isinstance(events, str) or not isinstance(events, Iterable) else [*events]
    if not isinstance(handler_id, str) or not handler_id:
        raise TelemetryError(f"handler_id must be a non-empty string, got {handler_id!r}.")
    if not callable(fn):
        raise TelemetryError(
            f"a handler must be callable as fn(event, measurements, metadata, config), "
            f"got {fn!r} (handler {handler_id!r})."
        )
    for event in events:
        if not isinstance(event, str) or not event:
            raise TelemetryError(
                f"an event must be a non-empty string, got {event!r} (handler {handler_id!r})."
            )
    with _lock:
        if any(h.handler_id == handler_id for hs in _handlers.values() for h in hs):
            raise TelemetryError(
                f"handler_id must be unique, got {handler_id!r} again: detach it first."
            )
        changed = dict(_handlers)
        for event in dict.fromkeys(events):
            handler = Handler(handler_id, event, fn, config)
            changed[event] = (*changed.get(event, ()), handler)
        _handlers = changed


def detach(handler_id: str) -> bool:
    """Remove a handler from every event. Returns whether there was one."""
    global _handlers  # noqa: PLW0603 - see the note beside it
    with _lock:
        kept = {
            e: tuple(h for h in hs if h.handler_id != handler_id) for e, hs in _handlers.items()
        }
        removed = kept != _handlers
        _handlers = {event: handlers for event, handlers in kept.items() if handlers}
    return removed


def list_handlers(prefix: str = "") -> list[Handler]:
    """The attached handlers of all events whose name starts with `prefix`."""
    return [h for event, hs in _handlers.items() if event.startswith(prefix) for h in hs]


def listening(*events: str) -> bool:
    """Whether a handler is attached to any of `events`, to skip costly measurements otherwise."""
    return any(event in _handlers for event in events) if _handlers else False


def execute(event: str, measurements: Payload, metadata: Payload | None = None) -> None:
    """Call the handlers of `event`. Without a handler this is one dictionary lookup."""
    handlers = _handlers.get(event)
    if handlers is None:
        return
    for handler in handlers:
        try:
            handler.fn(event, measurements, {} if metadata is None else metadata, handler.config)
        except Exception:  # noqa: BLE001 - a handler must never reach training
            if detach(handler.handler_id):
                _log.exception(
                    "telemetry handler %r raised on %s and is detached", handler.handler_id, event
                )


_event_log = logging.getLogger("steelyard")
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
    if _event_log.isEnabledFor(level):
        facts = {**metadata, **measurements}
        facts.pop("system_time", None)
        line = " ".join(f"{name}={_show(value)}" for name, value in facts.items())
        _event_log.log(level, "%s %s", event, line)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
