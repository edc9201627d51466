"""Sessions: one for each client. A client that is not heard of any more has none."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

from steelyard.engine.server.http_errors import FORBIDDEN, GONE, not_found
from steelyard.engine.server.uploaded_loss.interpreter import TracedLoss

_REMEMBERED = 1000


@dataclass(eq=False)
class ClientSession:
    """A client, as the server knows it.

    Attributes:
        session_id: its name, which nobody can guess.
        user_metadata: what it said about itself.
        display_name: so too.
        losses: what it has uploaded, by id.
        created: when it came, in seconds since the epoch.
        seen: when it was last heard of, by the monotonic clock.
        heartbeats: how often it said that it is there.
        waiting: how many of its requests are held until there is an answer.
    """

    session_id: str
    user_metadata: dict[str, Any]
    display_name: str | None
    losses: dict[str, TracedLoss] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)
    heartbeats: int = 0
    waiting: int = 0


class Sessions:
    """The clients that are here."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: dict[str, ClientSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(list(self._by_id.values()))

    def begin(
        self, user_metadata: dict[str, Any] | None, display_name: str | None
    ) -> ClientSession:
        """A new client.

        Raises:
            HTTPException: there are too many.
        """
        if len(self._by_id) >= self._most:
            raise HTTPException(
                FORBIDDEN, f"at most {self._most} clients may be here at once: close one first."
            )
        session = ClientSession(str(uuid.uuid4()), user_metadata or {}, display_name)
        self._by_id[session.session_id] = session
        return session

    def get(self, session_id: str) -> ClientSession:
        """The session, which is heard of with this.

        Raises:
            HTTPException: it has ended, or never was.
        """
        session = self._by_id.get(session_id)
        if session is None:
            if session_id in self._ended:
                raise HTTPException(GONE, f"session {session_id!r} has ended: make a new client.")
            raise not_found("session_id", session_id, "make a new client")
        session.seen = time.monotonic()
        return session

    def heard(self, session_id: str) -> None:
        """Note that a client is there, if it is one."""
        if session_id in self._by_id:
            self._by_id[session_id].seen = time.monotonic()

    @contextmanager
    def waiting(self, session_id: str) -> Iterator[None]:
        """While a client waits for an answer, it is there."""
        session = self._by_id.get(session_id)
        if session is None:
            yield
            return
        session.waiting += 1
        try:
            yield
        finally:
            session.waiting -= 1
            session.seen = time.monotonic()

    def end(self, session_id: str) -> None:
        """A client has gone."""
        if self._by_id.pop(session_id, None) is not None:
            self._ended[session_id] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def silent(self, seconds: float) -> list[str]:
        """Those that were not heard of for so long."""
        now = time.monotonic()
        return [s.session_id for s in self if not s.waiting and now - s.seen > seconds]
