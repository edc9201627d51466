"""ServerFutures: the answers that clients come back for.

A request that takes time is answered at once with a ticket's name; its answer is fetched with
another request, which is held until the answer is there. All of this lives on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from tinker.types import RequestErrorCategory, RequestFailedResponse

from steelyard.engine.server.http_errors import (
    BAD_REQUEST,
    ENGINE_FAILED,
    STOPPING,
    is_clients_fault,
    refusal,
    sentence,
)
from steelyard.errors import ClosedError

JSON, PROTOBUF = "application/json", "application/x-protobuf"
_MOST_KEPT = 8192

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What a ticket is exchanged for.

    Attributes:
        body: as it is sent.
        media_type: of the body.
        failed: whether it says what went wrong.
    """

    body: bytes
    media_type: str = JSON
    failed: bool = False


@dataclass(eq=False)
class ServerFuture:
    """A request under way, or done.

    Attributes:
        name: what the client comes back with.
        verb: what was asked.
        session_id: of the client.
        work: the engine's future, once it was begun.
        answer: None until it is there.
        refused: the status and the sentence with which it was turned away at once, if it was.
        fetched: when its answer was first fetched.
    """

    name: str
    verb: str
    session_id: str
    work: Future[Any] | None = None
    answer: Answer | None = None
    refused: tuple[int, str] | None = None
    fetched: float | None = None
    _there: asyncio.Event = field(default_factory=asyncio.Event)
    _listeners: list[Callable[[ServerFuture], None]] = field(default_factory=list)

    def settle(self, answer: Answer) -> None:
        """Here is the answer; the first one counts."""
        if self.answer is None:
            self.answer = answer
            self._there.set()
            for listener in self._listeners:
                listener(self)
            # They know this ticket: a circle would keep what they hold, a model perhaps.
            self.work, self._listeners = None, []

    def when_settled(self, listener: Callable[[ServerFuture], None]) -> None:
        """Call `listener` when the answer is there."""
        self._listeners.append(listener)

    def follow(
        self,
        work: Future[T],
        encode: Callable[[T], Answer],
        then: Callable[[T], None] = lambda _: None,
    ) -> None:
        """Settle with what the engine gives.

        Args:
            work: the engine's future.
            encode: makes the answer, on the engine's thread.
            then: called with what it gave, on the loop, before the answer is there.
        """
        loop = asyncio.get_running_loop()
        self.work = work

        def finish(given: list[T], answer: Answer) -> None:
            for value in given:
                then(value)
            self.settle(answer)

        def finished(done: Future[T]) -> None:
            answer = _answer_of(done, encode)
            given = [] if answer.failed else [done.result()]
            # The loop is closed once the server has stopped, and nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, given, answer)

        work.add_done_callback(finished)

    def turn_away(self, error: Exception) -> None:
        """Settle with an error that came before the work began.

        Raises:
            Exception: the error, if it comes from what was asked. If it does not, the client
                hears of it when it comes for the answer: a status of 500 would have it ask again.
        """
        self.settle(_failure_of(error))
        if is_clients_fault(error):
            # Not the error itself: it would keep what was asked, which may be large.
            self.refused = refusal(error).status_code, sentence(error)
            self.fetched = time.monotonic()
            raise error

    def check(self) -> None:
        """Nothing, unless the request was turned away: then so is whoever sends it again.

        Raises:
            HTTPException: what it was turned away with.
        """
        if self.refused is not None:
            raise HTTPException(*self.refused)

    def abandon(self, why: str, category: RequestErrorCategory = RequestErrorCategory.User) -> None:
        """Give up what was not begun; what runs is finished."""
        if self.work is None or self.work.cancel():
            self.settle(failure(why, category))

    async def wait(self, seconds: float) -> Answer | None:
        """The answer, or None if it takes longer."""
        try:
            await asyncio.wait_for(self._there.wait(), seconds)
        except TimeoutError:
            return None
        if self.fetched is None:
            self.fetched = time.monotonic()
        return self.answer


class ServerFutures:
    """All tickets, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, ServerFuture] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[ServerFuture]:
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> ServerFuture | None:
        """The ticket of that name, if it is still kept."""
        return self._by_name.get(name)

    def issue(self, name: str, verb: str, session_id: str) -> ServerFuture:
        """A new ticket. If there are very many, the oldest that has its answer is dropped."""
        if len(self) >= _MOST_KEPT:
            for ticket in self._by_name.values():
                if ticket.answer is not None:
                    self.drop(ticket)
                    break
        ticket = self._by_name[name] = ServerFuture(name, verb, session_id)
        return ticket

    def drop(self, ticket: ServerFuture) -> None:
        """Keep a ticket no longer."""
        self._by_name.pop(ticket.name, None)

    def forget_fetched(self, seconds: float) -> None:
        """Drop the tickets whose answers were fetched so long ago."""
        now = time.monotonic()
        for ticket in self:
            if ticket.fetched is not None and now - ticket.fetched > seconds:
                self.drop(ticket)


def failure(why: str, category: RequestErrorCategory) -> Answer:
    """An answer that makes the SDK raise at once. A status of 500 would make it ask for ever."""
    said = RequestFailedResponse(error=why, category=category).model_dump(mode="json")
    fault = category is RequestErrorCategory.User
    said["status"] = BAD_REQUEST if fault else ENGINE_FAILED
    return Answer(json.dumps(said).encode(), failed=True)


def _answer_of(work: Future[T], encode: Callable[[T], Answer]) -> Answer:
    try:
        return encode(work.result())
    except CancelledError:
        return failure("the request was cancelled before it began.", RequestErrorCategory.User)
    except Exception as error:  # noqa: BLE001 - whatever the engine raised, the client hears of it
        return _failure_of(error)


def _failure_of(error: Exception) -> Answer:
    if is_clients_fault(error):
        return failure(sentence(error), RequestErrorCategory.User)
    if isinstance(error, ClosedError):
        return failure(STOPPING, RequestErrorCategory.Server)
    why = f"the engine failed: {type(error).__name__}: {sentence(error)}"
    return failure(why, RequestErrorCategory.Server)
