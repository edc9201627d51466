"""`JsonService`: an HTTP endpoint that judges, with retries and connections kept."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from steelyard._extras import require
from steelyard.errors import InputError, SpecError, TermError
from steelyard.spec.checks import OptionChecks, is_finite

if TYPE_CHECKING:
    import httpx

TOO_MANY_REQUESTS = 429
MAX_REDIRECTS = 5
# The redirects that keep method and body (RFC 9110, 15.4.8 and 15.4.9). After a 301, 302 or 303 a
# client sends a GET without a body, whose response would be no verdict on the datum.
SAME_METHOD = (307, 308)
# Without compression the size limit can be applied to the bytes as they arrive.
_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
}


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of the requests to one endpoint: see `ExternalValidation`."""

    url: str = field(repr=False)  # it may hold a password, and so may the headers
    headers: Mapping[str, str] | None = field(repr=False)
    concurrency: int
    request_timeout: float
    retries: int
    backoff: float
    max_backoff: float
    max_bytes: int
    follow_redirects: bool

    def check(self, checks: OptionChecks, owner: str) -> None:
        """Check the options of a regularizer or reward of that name.

        Raises:
            SpecError: one is invalid.
            MissingExtraError: httpx is not installed.
        """
        checks.whole("concurrency", self.concurrency, 1, owner)
        checks.positive("request_timeout", self.request_timeout, owner)
        checks.whole("retries", self.retries, 0, owner)
        checks.at_least("backoff", self.backoff, 0, owner)
        checks.at_least("max_backoff", self.max_backoff, 0, owner)
        checks.whole("max_bytes", self.max_bytes, 1, owner)
        checks.flag("follow_redirects", self.follow_redirects, owner)
        title = f"{checks.kind} {owner!r}"
        _check_url(self.url, title)
        require("httpx", title)
        _check_headers(self.headers, title)


@dataclass(frozen=True)
class _Retry:
    """Reason to repeat an attempt, and the seconds to wait that the server asked for."""

    reason: str
    after: float = 0.0


class Response(NamedTuple):
    """Parsed response, the number of retries, and the seconds that the last attempt took."""

    content: Any
    retries: int
    seconds: float


class HttpSession:
    """Connection pool of one event loop, kept open from call to call.

    An httpx client and an asyncio semaphore belong to the loop they are first used on, so each
    loop has a session of its own.
    """

    def __init__(self, client: httpx.AsyncClient, concurrency: int) -> None:
        self.client = client
        self.semaphore = asyncio.Semaphore(concurrency)
        self._lifetime = _close_with_loop(client)

    async def open(self) -> None:
        """Register the connections to be closed with the loop or with the last reference."""
        await anext(self._lifetime)

    async def close(self) -> None:
        """Close the connections. Call it on the session's own loop."""
        await self._lifetime.aclose()


class Endpoint:
    """URL that answers a JSON POST request with a JSON response.

    `public_url` is the URL without the parts that may be secret: user, password, query and
    fragment.

    Only 307 and 308 are followed, at most `MAX_REDIRECTS` of them, and not from https to http. The
    custom headers and the password go only to the scheme, host and port of the URL. Cookies of
    the service are neither kept nor sent.
    """

    def __init__(self, options: ServiceOptions) -> None:
        parts = urlsplit(options.url)
        self._user = None if parts.username is None else (parts.username, parts.password or "")
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="")
        self._url = bare.geturl()
        self.public_url = bare._replace(query="").geturl()
        self._headers = {**_HEADERS, **(options.headers or {})}
        self._options = options

    async def session(self) -> HttpSession:
        """Open a session on the running loop."""
        import httpx  # noqa: PLC0415 - an extra

        concurrency = self._options.concurrency
        client = httpx.AsyncClient(
            auth=self._user,
            headers=self._headers,
            # httpx would turn a redirected POST into a GET, and send it with all headers but
            # Authorization. Its cookie jar matches by host alone, across ports.
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            timeout=None,  # noqa: S113 - `_attempt` limits each attempt as a whole
        )
        session = HttpSession(client, concurrency)
        await session.open()
        return session

    async def post(self, session: HttpSession, body: str) -> Response:
        """Send a JSON body, and parse the response.

        Raises:
            TermError: there is no response, or it is not JSON.
        """
        attempts = self._options.retries + 1
        retry = _Retry("")
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(self._pause(attempt, retry.after))
            # The semaphore is not held during the pause, and the time limit of an attempt starts
            # after it was acquired: a request that waits for its turn does not time out.
            async with session.semaphore:
                began = perf_counter()
                outcome = await self._attempt(session.client, body)
            if not isinstance(outcome, _Retry):
                return Response(_parse_json(outcome), attempt, perf_counter() - began)
            retry = outcome
        raise TermError(f"got {retry.reason} in {attempts} attempts")

    async def _attempt(self, client: httpx.AsyncClient, body: str) -> bytes | _Retry:
        import httpx  # noqa: PLC0415 - an extra

        limit = self._options.request_timeout
        try:
            # Limits request and response as a whole: httpx's own timeouts restart at every byte.
            async with asyncio.timeout(limit):
                return await self._send(client, body)
        except TimeoutError:
            return _Retry(f"no answer within {limit:g} s")
        except httpx.TransportError as error:
            return _Retry(type(error).__name__)
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # httpx also parses a Location
            failure = type(error).__name__
        # Raised outside the except block: as its context, httpx's error would carry the request
        # with its secret URL and headers.
        raise TermError(f"got {failure}")

    async def _send(self, client: httpx.AsyncClient, body: str) -> bytes | _Retry:
        import httpx  # noqa: PLC0415 - an extra

        request = client.build_request("POST", self._url, content=body)
        auth: Any = httpx.USE_CLIENT_DEFAULT
        for _ in range(MAX_REDIRECTS + 1):
            async with aclosing(await client.send(request, auth=auth, stream=True)) as response:
                if not (self._options.follow_redirects and response.has_redirect_location):
                    return await self._read(response)
                url = _redirect_target(response)
            if auth is None or _origin(url) != _origin(request.url):
                # Once another origin has answered, nothing secret is sent any more, even back to
                # the first one: the other one chose the path. A Request of its own has none of
                # the client's headers, and auth=None none of its password.
                request, auth = httpx.Request("POST", url, headers=_HEADERS, content=body), None
            else:
                request = client.build_request("POST", url, content=body)
        raise TermError(f"got more than {MAX_REDIRECTS} redirects")

    async def _read(self, response: httpx.Response) -> bytes | _Retry:
        status = response.status_code
        if status == TOO_MANY_REQUESTS or response.is_server_error:
            return _Retry(f"status {status}", _retry_after(response.headers.get("Retry-After")))
        if not response.is_success:
            raise TermError(f"got status {status}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise TermError("got a compressed answer, which was not asked for")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._options.max_bytes:
                raise TermError(f"got more than max_bytes={self._options.max_bytes}")
        return bytes(body)

    def _pause(self, attempt: int, after: float) -> float:
        """Seconds before a retry: exponential backoff with jitter, or `Retry-After` if longer.

        `min(max(backoff · 2^(attempt - 1) · U[0.5, 1], after), max_backoff)`; the jitter spreads
        requests that failed together.
        """
        options = self._options
        grown = options.backoff * 2.0 ** (attempt - 1) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        return min(max(grown, after), options.max_backoff)


async def _close_with_loop(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    """Close the client when the event loop shuts down, or when this generator is collected.

    asyncio has no hook for the end of a loop, but `shutdown_asyncgens` closes all generators that
    were started on it, and the loop's finalizer hook closes one that is garbage-collected.
    """
    try:
        yield
    finally:
        await client.aclose()


def _redirect_target(response: httpx.Response) -> httpx.URL:
    """URL that a redirect names. The errors do not show it: it may repeat secrets of ours."""
    status, current = response.status_code, response.request.url
    if status not in SAME_METHOD:
        raise TermError(f"got status {status}, a redirect that would not repeat the POST request")
    url = current.join(response.headers["Location"])  # httpx has refused one that is no URL
    if url.scheme not in ("http", "https") or not url.host:
        raise TermError(f"got status {status} without an address to go to")
    if (current.scheme, url.scheme) == ("https", "http"):
        raise TermError(f"got status {status}, a redirect from https to http")
    return url.copy_with(userinfo=b"", fragment=None)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise TermError("got something that is no JSON") from None


def _retry_after(header: str | None) -> float:
    """Seconds to wait by a `Retry-After` header, a number or a date; 0 if absent or invalid."""
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


_READY_SECONDS = 10.0


class JsonService:
    """HTTP endpoint that answers each JSON request with a JSON object that holds a number.

    Connections stay open from call to call, until
    `close`, the end of the event loop, or the end of the program.

    Args:
        owner: the name of the regularizer or reward that asks, for messages.
        checks: the checks of its kind.
        member: the member of the response that holds the number.
        options: the address and the limits.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: httpx is not installed.
    """

    def __init__(
        self, owner: str, checks: OptionChecks, member: str, options: ServiceOptions
    ) -> None:
        options.check(checks, owner)
        self._endpoint = Endpoint(options)
        self._member = member
        self._title = f"{checks.kind} {owner!r}"
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
        return response._replace(content=_number(response.content, self._member))

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


def _number(response: Any, member: str) -> float:
    if not isinstance(response, dict):
        raise TermError(f"got a JSON {type(response).__name__}")
    if member not in response:
        raise TermError("got an object without it")
    number = response[member]
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


def _check_headers(headers: Any, title: str) -> None:
    valid = isinstance(headers, Mapping) and all(
        isinstance(text, str) and text.isascii() and text.isprintable()
        for pair in headers.items()
        for text in pair
    )
    if not (valid or headers is None):
        raise SpecError(
            f"headers must be a mapping of names to values, printable ASCII strings, got "
            f"something else ({title})."
        )
