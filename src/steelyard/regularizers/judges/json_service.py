"""`JsonService`: an HTTP endpoint that judges, with its options checked and connections kept."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from steelyard._extras import require
from steelyard.errors import InputError, SpecError, TermError
from steelyard.regularizers._http_endpoint import Endpoint, HttpSession, RequestLimits, Response
from steelyard.spec import OptionChecks, is_finite

_READY_SECONDS = 10.0


class JsonService:
    """HTTP endpoint that answers each JSON request with a JSON object that holds a number.

    The options are those of `ExternalValidation`. Connections stay open from call to call, until
    `close`, the end of the event loop, or the end of the program.

    Args:
        owner: the name of the regularizer or reward that asks, for messages.
        checks: the checks of its kind.
        field: the member of the response that holds the number.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: httpx is not installed.
    """

    def __init__(
        self,
        owner: str,
        checks: OptionChecks,
        field: str,
        *,
        url: str,
        headers: Mapping[str, str] | None,
        concurrency: int,
        request_timeout: float,
        retries: int,
        backoff: float,
        max_backoff: float,
        max_bytes: int,
        follow_redirects: bool,
    ) -> None:
        limits = RequestLimits(
            concurrency=checks.whole("concurrency", concurrency, 1, owner),
            request_timeout=checks.positive("request_timeout", request_timeout, owner),
            retries=checks.whole("retries", retries, 0, owner),
            backoff=checks.at_least("backoff", backoff, 0, owner),
            max_backoff=checks.at_least("max_backoff", max_backoff, 0, owner),
            max_bytes=checks.whole("max_bytes", max_bytes, 1, owner),
        )
        checks.flag("follow_redirects", follow_redirects, owner)
        title = f"{checks.kind} {owner!r}"
        _check_url(url, title)
        require("httpx", title)
        checked = _checked_headers(headers, title)
        self._endpoint = Endpoint(url, checked, limits, follow_redirects=follow_redirects)
        self._field = field
        self._title = title
        self._sessions: dict[asyncio.AbstractEventLoop, HttpSession] = {}

    @property
    def public_url(self) -> str:
        """The URL without the parts that may be secret."""
        return self._endpoint.public_url

    async def post(self, body: str) -> Response:
        """Send a request; the content of the response is the number in it.

        Raises:
            TermError: there is no response, or no finite number in it; the message says what there
                was instead.
        """
        response = await self._endpoint.post(await self._session(), body)
        return response._replace(content=_number(response.content, self._field))

    def check_ready(self) -> None:
        """Check that something listens at the URL, without a request; not through a proxy.

        Raises:
            TermError: nothing does.
        """
        try:
            check_listener(self.public_url)
        except OSError as error:
            raise TermError(
                f"a server must listen for {self._title} at {self.public_url}, and none does: "
                f"{error}. Start it, or mend the url."
            ) from error

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        try:
            current = asyncio.get_running_loop()
        except RuntimeError:
            current = None
        while self._sessions:
            loop, session = self._sessions.popitem()
            if loop.is_running():
                closed = asyncio.run_coroutine_threadsafe(session.close(), loop)
                if loop is not current:  # waiting on our own loop would be a deadlock
                    closed.result(timeout=5.0)

    async def _session(self) -> HttpSession:
        """Session of the running loop, usually the library's own; opened on first use."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            for other in list(self._sessions):
                if other.is_closed():  # which also closed its connections
                    self._sessions.pop(other, None)
            session = self._sessions[loop] = await self._endpoint.session()
        return session


def check_listener(url: str) -> None:
    """Check that something listens at a URL, without a request; not through a proxy.

    Raises:
        OSError: nothing does.
    """
    parts = urlsplit(url)
    if parts.scheme in getproxies() and not proxy_bypass(str(parts.hostname)):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((parts.hostname, port), timeout=_READY_SECONDS).close()


def as_json(payload: Any, what: str, where: str, *, datum: int | None = None) -> str:
    """Serialise a request; `where` and `datum` say which, in the message and in the error.

    Raises:
        InputError: JSON cannot hold it.
    """
    try:
        return json.dumps(payload, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{what} must give something JSON can hold for {where}, got "
            f"{type(payload).__name__}: {error}.",
            datum=datum,
        ) from error


def _number(response: Any, field: str) -> float:
    if not isinstance(response, dict):
        raise TermError(f"got a JSON {type(response).__name__}")
    if field not in response:
        raise TermError("got an object without it")
    number = response[field]
    if not is_finite(number):
        got = number if isinstance(number, float) else f"a {type(number).__name__}"
        raise TermError(f"got {got} there")
    return float(number)


# The values that these two reject may hold a secret, so their errors do not show them.
def _check_url(url: Any, title: str) -> None:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        valid = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and (parts is None or parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise SpecError(
            f"url must be an http:// or https:// address with a host, got a {type(url).__name__} "
            f"that is not ({title})."
        )


def _checked_headers(headers: Any, title: str) -> dict[str, str]:
    given = {} if headers is None else headers
    valid = isinstance(given, Mapping) and all(
        isinstance(text, str) and text.isascii() and text.isprintable()
        for pair in given.items()
        for text in pair
    )
    if not valid:
        raise SpecError(
            f"headers must be a mapping of names to values, printable ASCII strings, got "
            f"something else ({title})."
        )
    return dict(given)
