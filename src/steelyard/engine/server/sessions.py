"""Client sessions: one for each client of the SDK, ended when the client closes or falls silent."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from tinker.types.future_completion import FutureFailed, FutureFinished

from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.server.futures import ServerFuture
from steelyard.engine.server.http_messages import FORBIDDEN, GONE, not_found
from steelyard.engine.server.uploaded_loss.interpreter import TracedLoss

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
        uuid_match = _UUID.match(value)
        if uuid_match is not None and uuid_match[1] != self._instance:
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


# The SDK numbers the requests of clone k of a sampling client from k * SEQ_IDS_PER_CLONE.
SEQ_IDS_PER_CLONE = 1_000_000_000


class CompletionLog:
    """Completed requests, numbered from 1 in the order of completion.

    `retrieve_futures` reads the log with a cursor: the number of the last entry that the client
    has received. Entries up to the cursor are acknowledged and dropped.
    """

    def __init__(self) -> None:
        self._first = 1
        self._entries: list[FutureFinished | FutureFailed] = []
        self._added = asyncio.Event()

    def add(self, future: ServerFuture) -> None:
        """Append a future that has its result."""
        result = future.result
        if result is None or result.failed:
            self._entries.append(FutureFailed(request_id=future.request_id))
        else:
            self._entries.append(
                FutureFinished(
                    request_id=future.request_id,
                    response_payload_uncompressed_size=len(result.body),
                )
            )
        self._added.set()

    def wake(self) -> None:
        """Wake all readers, without an entry."""
        self._added.set()

    async def read_after(
        self, cursor: int, seconds: float
    ) -> tuple[list[FutureFinished | FutureFailed], int]:
        """Entries after `cursor`, and the next cursor; waits up to `seconds` for an entry."""
        acknowledged = min(max(cursor - self._first + 1, 0), len(self._entries))
        self._entries = self._entries[acknowledged:]
        self._first += acknowledged
        if not self._entries:
            self._added.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._added.wait(), seconds)
        return list(self._entries), self._first + len(self._entries) - 1


@dataclass(eq=False)
class SamplingSession:
    """A sampler: weights to sample from, shared by a sampling client and its clones.

    Attributes:
        sampler_id: the id of the sampling session.
        session_id: the id of the client's session.
        base_model: the name of the base model.
        model_path: the path of the saved weights, if there is one.
        client: the future of the engine's client.
        payload: a hash of the request that created it.
        clones: the number of clones of the SDK's client that have joined.
        completions: the log of each clone; 0 is the original.
    """

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    client: Future[LocalSamplingClient]
    payload: bytes | None = None
    clones: int = 0
    completions: dict[int, CompletionLog] = field(default_factory=dict)

    def completions_of(self, clone_id: int) -> CompletionLog:
        """Log of one clone.

        Raises:
            HTTPException: no such clone has joined.
        """
        if not 0 <= clone_id <= self.clones:
            raise not_found(
                "the copy of a sampler", str(clone_id), "join the sampling session first"
            )
        return self.completions.setdefault(clone_id, CompletionLog())


class SamplingSessions:
    """The samplers of a server; at the limit, the least recently used one is dropped.

    Args:
        max_samplers: the largest number of samplers kept.
    """

    def __init__(self, max_samplers: int) -> None:
        self._max_samplers = max_samplers
        self._by_id: OrderedDict[str, SamplingSession] = OrderedDict()

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._by_id

    def add(self, sampler: SamplingSession) -> None:
        """Add a sampler, in place of the least recently used one if there are too many."""
        while len(self._by_id) >= self._max_samplers:
            self._by_id.popitem(last=False)
        self._by_id[sampler.sampler_id] = sampler

    def get(self, sampler_id: str) -> SamplingSession:
        """Return a sampler, and mark it as the most recently used.

        Raises:
            HTTPException: it does not exist, or was dropped.
        """
        sampler = self._by_id.get(sampler_id)
        if sampler is None:
            raise not_found(
                "sampling_session_id",
                sampler_id,
                f"at most {self._max_samplers} are kept; make a new one from saved weights",
            )
        self._by_id.move_to_end(sampler_id)
        return sampler

    def of_session(self, session_id: str) -> list[str]:
        """Ids of the samplers of a client's session."""
        return [s.sampler_id for s in self._by_id.values() if s.session_id == session_id]

    def end_session(self, session_id: str) -> None:
        """Remove the samplers of a client's session.

        Readers of their completion logs are not woken: they belong to an SDK client that is
        about to disconnect, and would only poll again and log an error.
        """
        for sampler_id in self.of_session(session_id):
            del self._by_id[sampler_id]

    def wake(self) -> None:
        """Wake all readers of completion logs."""
        for sampler in self._by_id.values():
            for log in sampler.completions.values():
                log.wake()
