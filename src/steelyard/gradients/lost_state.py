"""Changes of an object by a call in another process, which are lost when the call ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import cloudpickle


class AttributeRecord:
    """The attributes of the object that a function belongs to, as they would be sent.

    Args:
        fn: a bound method, a callable object, or a wrapper of one.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._owner = _owner_of(fn)
        self._attributes = _attributes_of(self._owner)

    def changed(self) -> tuple[str, ...]:
        """Names of those that have changed since; a cached property that was read has not."""
        now = _attributes_of(self._owner)
        return tuple(name for name, value in now.items() if self._attributes.get(name) != value)


def _owner_of(fn: Any) -> object:
    while True:
        if isinstance(fn, partial):
            fn = fn.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            return getattr(fn, "__self__", fn)


def _attributes_of(owner: object) -> dict[str, bytes]:
    """Pickles of the attributes; without those that do not pickle, such as a connection."""
    pickles: dict[str, bytes] = {}
    try:
        state = owner.__getstate__()
    except Exception:  # noqa: BLE001 - anybody's code
        state = None
    for name, value in (state if isinstance(state, Mapping) else {}).items():
        if not isinstance(getattr(type(owner), name, None), cached_property):
            with suppress(Exception):
                pickles[name] = cloudpickle.dumps(value)
    return pickles
