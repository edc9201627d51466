"""The requests of one model, begun in the order of their numbers.

The SDK numbers the requests of a model from 1. Parts of one batch are sent at the same time, the
first part last, and whatever got no answer is sent again: so requests come out of order, and
more than once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.exceptions import HTTPException
from tinker.types import RequestErrorCategory

from steelyard.engine.server.futures import ServerFuture, ServerFutures, failure
from steelyard.engine.server.http_errors import BAD_REQUEST, FORBIDDEN

Begin = Callable[[], None]


class Sequencer:
    """Where requests wait until all with smaller numbers have begun.

    Args:
        model_id: the name of the model.
        tickets: all tickets.
        max_waiting: the most that may wait.
    """

    def __init__(self, model_id: str, tickets: ServerFutures, max_waiting: int) -> None:
        self._model_id = model_id
        self._tickets = tickets
        self._max_waiting = max_waiting
        self._next = 1
        # None: the request was turned away, and nothing is to be begun in its place.
        self._ready: dict[int, Begin | None] = {}
        self._blocked_since: float | None = None

    @property
    def free(self) -> int:
        """A number after all that have come, for a request that has none."""
        number = max([self._next - 1, *self._ready]) + 1
        while self._tickets.get(self._name(number)) is not None:
            number += 1
        return number

    def known(self, number: int, verb: str) -> ServerFuture | None:
        """The ticket of a request that was sent before; None if it is new.

        Raises:
            HTTPException: the number belongs to another request, cannot be one, or is too far
                ahead; or the request was turned away before.
        """
        ticket = self._tickets.get(self._name(number))
        if ticket is not None and ticket.verb != verb:
            raise HTTPException(
                BAD_REQUEST,
                f"seq_id must be used once, and {number} was a {ticket.verb} of {self._model_id}, "
                f"got a {verb}.",
            )
        if ticket is not None:
            ticket.check()
        if ticket is None and number < self._next:
            raise HTTPException(
                BAD_REQUEST,
                f"seq_id must be {self._next} or more, the next of {self._model_id}, "
                f"got {number}, which has been and is not kept.",
            )
        if number >= self._next + self._max_waiting:
            raise HTTPException(
                FORBIDDEN,
                f"seq_id must be less than {self._next + self._max_waiting}, as at most "
                f"{self._max_waiting} requests of a model may wait, got {number}.",
            )
        return ticket

    def take(self, number: int, verb: str, session_id: str) -> ServerFuture:
        """A ticket for a new request."""
        return self._tickets.issue(self._name(number), verb, session_id)

    def ready(self, number: int, begin: Begin) -> None:
        """A request may begin, when its turn comes."""
        self._ready[number] = begin
        self._advance()

    def skip(self, number: int) -> None:
        """A request was turned away; those behind it do not wait for it."""
        self._ready[number] = None
        self._advance()

    def close_gap(self, seconds: float) -> None:
        """Fail the requests that have waited too long for one that never came."""
        arrived = self._tickets.get(self._name(self._next)) is not None
        since = self._blocked_since
        if since is None or arrived or time.monotonic() - since < seconds:
            return
        why = (
            f"seq_id {self._next} of {self._model_id} has not come within {seconds:g} seconds, so "
            f"what was to follow it was not done: send the step again."
        )
        for number in self._ready:
            ticket = self._tickets.get(self._name(number))
            if ticket is not None:
                ticket.settle(failure(why, RequestErrorCategory.User))
        self._next = max(self._ready) + 1
        self._ready = {}
        self._blocked_since = None

    def _advance(self) -> None:
        while self._next in self._ready:
            begin = self._ready.pop(self._next)
            self._next += 1
            self._blocked_since = None
            if begin is not None:
                begin()
        if self._ready and self._blocked_since is None:
            self._blocked_since = time.monotonic()

    def _name(self, number: int) -> str:
        return f"{self._model_id}:{number}"
