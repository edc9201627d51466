"""Asking an HTTP endpoint many questions, within limits."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from steelyard.errors import TermError

if TYPE_CHECKING:
    import httpx

TOO_MANY_REQUESTS = 429


@dataclass(frozen=True)
class RequestLimits:
    """What one endpoint may cost: see `ExternalValidation`."""

    concurrency: int
    request_timeout: float
    retries: int
    backoff: float
    max_backoff: float
    max_bytes: int


@dataclass(frozen=True)
class _Again:
    """Why an attempt is worth another, and how long the server wants to be left alone."""

    why: str
    after: float = 0.0


class HttpSession:
    """Connections on one event loop, kept open from call to call."""

    def __init__(self, client: httpx.AsyncClient, concurrency: int) -> None:
        self.client = client
        self.places = asyncio.Semaphore(concurrency)
        self._keeper = _closing(client)

    async def open(self) -> None:
        """Have the connections closed with the loop, or when nobody holds the session."""
        await anext(self._keeper)

    async def close(self) -> None:
        """Close the connections; on the session's own loop."""
        await self._keeper.aclose()


class Endpoint:
    """A URL that takes a JSON question by POST and gives a JSON answer.

    `where` is the URL without what may be secret: user, password, query and fragment.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], limits: RequestLimits, *, follow_redirects: bool
    ) -> None:
        parts = urlsplit(url)
        self._user = None if parts.username is None else (parts.username, parts.password or "")
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")
        self._url = bare.geturl()
        self.where = bare._replace(query="").geturl()
        # An answer that is not compressed can be counted as it comes.
        self._headers = {
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            **headers,
        }
        self._limits = limits
        self._follow_redirects = follow_redirects

    async def session(self) -> HttpSession:
        """New connections on the running loop."""
        import httpx  # noqa: PLC0415 - an extra

        most = self._limits.concurrency
        client = httpx.AsyncClient(
            auth=self._user,
            headers=self._headers,
            follow_redirects=self._follow_redirects,
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            timeout=None,  # noqa: S113 - each attempt as a whole has one
        )
        session = HttpSession(client, most)
        await session.open()
        return session

    async def ask(self, session: HttpSession, question: str) -> tuple[Any, int]:
        """The answer, and how many retries it took.

        Raises:
            TermError: there is none, or it is no JSON.
        """
        attempts = self._limits.retries + 1
        again = _Again("")
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(self._pause(attempt, again.after))
            async with session.places:
                outcome = await self._attempt(session.client, question)
            if not isinstance(outcome, _Again):
                return _parsed(outcome), attempt
            again = outcome
        raise TermError(f"got {again.why} in {attempts} attempts")

    async def _attempt(self, client: httpx.AsyncClient, question: str) -> bytes | _Again:
        import httpx  # noqa: PLC0415 - an extra

        limit = self._limits.request_timeout
        try:
            # The time of the whole exchange: httpx's own limits start again with every byte.
            async with asyncio.timeout(limit):
                async with client.stream("POST", self._url, content=question) as response:
                    return await self._read(response)
        except TimeoutError:
            return _Again(f"no answer within {limit:g} s")
        except httpx.TransportError as error:
            return _Again(type(error).__name__)
        except httpx.HTTPError as error:
            failure = type(error).__name__
        # Not beside the error, which holds the request with its URL and headers.
        raise TermError(f"got {failure}")

    async def _read(self, response: httpx.Response) -> bytes | _Again:
        status = response.status_code
        if status == TOO_MANY_REQUESTS or response.is_server_error:
            return _Again(f"status {status}", _retry_after(response.headers.get("Retry-After")))
        if not response.is_success:
            raise TermError(f"got status {status}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise TermError("got a compressed answer, which was not asked for")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._limits.max_bytes:
                raise TermError(f"got more than max_bytes={self._limits.max_bytes}")
        return bytes(body)

    def _pause(self, attempt: int, after: float) -> float:
        """Twice as long each time, with jitter so that not all come back at once."""
        limits = self._limits
        grown = limits.backoff * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        return min(max(grown, after), limits.max_backoff)


async def _closing(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    """Close the client at the end of the loop it is used on.

    An event loop closes the generators that were begun on it when it shuts down, or when they
    are collected; nothing else is told of its end.
    """
    try:
        yield
    finally:
        await client.aclose()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise TermError("got something that is no JSON") from None


def _retry_after(header: str | None) -> float:
    """The seconds a `Retry-After` asks for, as a number or a date; 0 if it asks for none."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        seconds = (when - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if seconds == seconds else 0.0  # noqa: PLR0124 - NaN
