"""Client sessions: one for each client of the SDK, ended when the client closes or falls silent."""

from __future__ import annotations

import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

from steelyard.engine.server.http_errors import FORBIDDEN, GONE, not_found
from steelyard.engine.server.uploaded_loss import TracedLoss

_MAX_ENDED = 1000
_UUID = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4}-){3}[0-9a-f]{12}")


@dataclass(eq=False)
class ClientSession:
    """Session of one client.

    Attributes:
        session_id: a random id that cannot be guessed; its first eight digits are those of the
            server process, so that a later one knows the ids of an earlier one.
        user_metadata: the client's own metadata.
        display_name: the client's own name for the session.
        losses: the uploaded losses, by id.
        created: time of creation, in seconds since the epoch.
        last_seen: time of the last request, by the monotonic clock.
        heartbeats: the number of heartbeats received.
        polling: the number of requests that are held open until a result is available.
    """

    session_id: str
    user_metadata: dict[str, Any]
    display_name: str | None
    losses: dict[str, TracedLoss] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    last_seen: float = field(default_factory=time.monotonic)
    heartbeats: int = 0
    polling: int = 0


class Sessions:
    """The open sessions of a server.

    Args:
        max_sessions: the largest number of sessions open at once.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._instance = uuid.uuid4().hex[:8]
        self._by_id: dict[str, ClientSession] = {}
        # Ids of ended sessions, oldest first: they get 410 and not 404, after which the SDK stops
        # its heartbeat.
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[ClientSession]:
        return iter(list(self._by_id.values()))

    def create(
        self, user_metadata: dict[str, Any] | None, display_name: str | None
    ) -> ClientSession:
        """Open a session.

        Raises:
            HTTPException: too many sessions are open.
        """
        if len(self._by_id) >= self._max_sessions:
            raise HTTPException(
                FORBIDDEN,
                f"at most {self._max_sessions} clients may be connected at once: close one first.",
            )
        session_id = f"{self._instance}{str(uuid.uuid4())[8:]}"
        session = ClientSession(session_id, user_metadata or {}, display_name)
        self._by_id[session.session_id] = session
        return session

    def get(self, session_id: str) -> ClientSession:
        """Return an open session and record that its client is alive.

        Raises:
            HTTPException: the session has ended, or never existed.
        """
        session = self._by_id.get(session_id)
        if session is None:
            if session_id in self._ended:
                raise HTTPException(GONE, f"session {session_id!r} has ended: make a new client.")
            self.check_instance("session_id", session_id)
            raise not_found("session_id", session_id, "make a new client")
        session.last_seen = time.monotonic()
        return session

    def check_instance(self, field: str, value: str) -> None:
        """Check that an id, which starts with that of a session, is not of an earlier server.

        Raises:
            HTTPException: it is the id of another server process than this one.
        """
        found = _UUID.match(value)
        if found is not None and found[1] != self._instance:
            # Not 404: after 410 the SDK stops its heartbeat.
            raise HTTPException(
                GONE,
                f"{field} must be one of this server process, got {value!r}: the server was "
                f"restarted, and what clients had in its memory is lost; make a new client, and "
                f"resume from a checkpoint.",
            )

    def touch(self, session_id: str) -> None:
        """Record that a client is alive, if its session is open."""
        if session_id in self._by_id:
            self._by_id[session_id].last_seen = time.monotonic()

    @contextmanager
    def polling(self, session_id: str) -> Iterator[None]:
        """Count a client as alive while one of its requests is held open."""
        session = self._by_id.get(session_id)
        if session is None:
            yield
            return
        session.polling += 1
        try:
            yield
        finally:
            session.polling -= 1
            session.last_seen = time.monotonic()

    def end(self, session_id: str) -> None:
        """End a session, if it is open."""
        if self._by_id.pop(session_id, None) is not None:
            self._ended[session_id] = None
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)

    def silent(self, seconds: float) -> list[str]:
        """Ids of the sessions without a request for more than `seconds`."""
        now = time.monotonic()
        return [s.session_id for s in self if not s.polling and now - s.last_seen > seconds]
