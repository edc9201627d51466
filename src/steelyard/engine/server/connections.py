"""Limits on connections: how many there are, and how long a request may take to arrive.

A connection is half-open while no whole request has arrived on it. uvicorn has a timeout only for
connections that have had a response; a client that connects and sends nothing would hold one for
ever.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# A body may take a second more for each so many bytes.
_BYTES_PER_SECOND = 2**16


class LimitedConnection(H11Protocol):
    """Connection that is closed if a request takes too long to arrive, or if there are too many.

    Attributes:
        request_seconds: for the head of a request; its body has as long again, and a second more
            for each 64 KiB that have arrived.
        max_connections: at this limit the connection that has been half-open for longest makes
            room for the new one; if there is none, the new one is closed.
        half_open: the half-open connections of this server, the oldest first.
    """

    request_seconds: float
    max_connections: int
    half_open: dict[LimitedConnection, None]

    _timer: asyncio.TimerHandle | None = None
    _began = 0.0
    _received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accept a connection, or close it if there are too many."""
        super().connection_made(transport)
        self._begin_request()
        if len(self.connections) > self.max_connections:
            next(iter(self.half_open)).abort()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request."""
        if self._timer is None:
            self._begin_request()
        self._received += len(data)
        super().data_received(data)
        if not self._is_half_open():
            self._end_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._end_request()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection when the server stops; a request that is not whole is given up."""
        if self.conn.their_state is h11.SEND_BODY and not self.cycle.response_complete:
            self.abort()
        else:
            super().shutdown()

    def abort(self) -> None:
        """Close the connection at once."""
        # Not counted from here on: `connection_lost` is called later.
        self._end_request()
        self.connections.discard(self)
        self.transport.abort()

    def _is_half_open(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _begin_request(self) -> None:
        self._began, self._received = self.loop.time(), 0
        self.half_open[self] = None
        self._timer = self.loop.call_later(self.request_seconds, self._check_progress)

    def _end_request(self) -> None:
        self.half_open.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self) -> None:
        allowed = self.request_seconds
        if self.conn.their_state is h11.SEND_BODY:
            allowed += self.request_seconds + self._received / _BYTES_PER_SECOND
        left = self._began + allowed - self.loop.time()
        if left <= 0:
            self.abort()
        else:
            self._timer = self.loop.call_later(left, self._check_progress)


def limited(request_seconds: float, max_connections: int) -> type[LimitedConnection]:
    """Class of the connections of one server."""
    return type(
        "LimitedConnection",
        (LimitedConnection,),
        {
            "request_seconds": request_seconds,
            "max_connections": max_connections,
            "half_open": {},
        },
    )
