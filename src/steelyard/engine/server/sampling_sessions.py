"""SamplingSessions: what clients sample from, and the news of which of their requests are done."""

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

# The SDK numbers the requests of a sampler's copies in blocks of this size.
BLOCK = 1_000_000_000


class News:
    """Which requests are done, numbered from 1 in the order in which they were."""

    def __init__(self) -> None:
        self._first = 1
        self._items: list[FutureFinished | FutureFailed] = []
        self._more = asyncio.Event()

    def add(self, ticket: ServerFuture) -> None:
        """A request has its answer."""
        answer = ticket.answer
        if answer is None or answer.failed:
            self._items.append(FutureFailed(request_id=ticket.name))
        else:
            self._items.append(
                FutureFinished(
                    request_id=ticket.name, response_payload_uncompressed_size=len(answer.body)
                )
            )
        self._more.set()

    def wake(self) -> None:
        """Let those who wait go."""
        self._more.set()

    async def after(
        self, cursor: int, seconds: float
    ) -> tuple[list[FutureFinished | FutureFailed], int]:
        """What is new since `cursor`, and the cursor for the next time; waits for news.

        What was before is known to have arrived, and is dropped.
        """
        seen = min(max(cursor - self._first + 1, 0), len(self._items))
        self._items, self._first = self._items[seen:], self._first + seen
        if not self._items:
            self._more.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._more.wait(), seconds)
        return list(self._items), self._first + len(self._items) - 1


@dataclass(eq=False)
class SamplingSession:
    """A sampling session, as the SDK calls it.

    Attributes:
        sampler_id: its name.
        session_id: its client's.
        base_model: the name of the base model.
        model_path: where its weights come from, if they were saved.
        client: the engine's client, when it is made.
        copies: how many copies of the SDK's client have joined.
        news: for each copy.
    """

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    client: Future[LocalSamplingClient]
    copies: int = 0
    news: dict[int, News] = field(default_factory=dict)

    def news_of(self, copy: int) -> News:
        """The news of one copy.

        Raises:
            HTTPException: no such copy has joined.
        """
        if not 0 <= copy <= self.copies:
            raise not_found("the copy of a sampler", str(copy), "join the sampling session first")
        return self.news.setdefault(copy, News())


class SamplingSessions:
    """All samplers; if there are too many, the one that was used longest ago goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: OrderedDict[str, SamplingSession] = OrderedDict()

    def __contains__(self, sampler_id: str) -> bool:
        return sampler_id in self._by_id

    def add(self, sampler: SamplingSession) -> None:
        """A new one."""
        while len(self._by_id) >= self._most:
            self._by_id.popitem(last=False)
        self._by_id[sampler.sampler_id] = sampler

    def get(self, sampler_id: str) -> SamplingSession:
        """The sampler of that name, which is used with this.

        Raises:
            HTTPException: it is not here.
        """
        sampler = self._by_id.get(sampler_id)
        if sampler is None:
            raise not_found(
                "sampling_session_id",
                sampler_id,
                f"at most {self._most} are kept; make a new one from saved weights",
            )
        self._by_id.move_to_end(sampler_id)
        return sampler

    def of_session(self, session_id: str) -> list[str]:
        """The names of a client's samplers."""
        return [s.sampler_id for s in self._by_id.values() if s.session_id == session_id]

    def end_session(self, session_id: str) -> None:
        """A client has gone, and its samplers with it.

        Whoever waits for news of them is not woken: that is the SDK, about to hang up, and it
        would only ask again, and complain.
        """
        for sampler_id in self.of_session(session_id):
            del self._by_id[sampler_id]

    def wake(self) -> None:
        """Let everybody go who waits for news."""
        for sampler in self._by_id.values():
            for news in sampler.news.values():
                news.wake()
