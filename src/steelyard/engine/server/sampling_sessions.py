"""Sampling sessions, and the log of which of their requests have completed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field

from tinker.types.future_completion import FutureFailed, FutureFinished

from steelyard.engine.sampling_client import LocalSamplingClient
from steelyard.engine.server.futures import ServerFuture
from steelyard.engine.server.http_errors import not_found

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
