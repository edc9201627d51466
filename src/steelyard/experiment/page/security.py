"""Access to the page: a token that becomes a cookie, the hosts, the origins, and the headers."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steelyard.engine.server.http_server import AllowedHosts
from steelyard.experiment.page import content_security_policy

_HEADERS = {
    "content-security-policy": content_security_policy.LIVE_PAGE,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_READING = ("GET", "HEAD")


class Tokens:
    """The token of a server, which is in the URL that it prints, and tokens for one use.

    Attributes:
        token: the token.
        cookie: name of the cookie that holds it. It differs between servers: a browser sends the
            cookies of a host to all of its ports.
    """

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self.cookie = f"steelyard-watch-{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"
        self._once: set[str] = set()

    def for_one_use(self) -> str:
        """Make a token that is accepted once: other users can read the arguments of a browser."""
        token = secrets.token_urlsafe(32)
        self._once.add(token)
        return token

    def accepts(self, given: str) -> bool:
        """Return whether a token is valid in a URL; one for one use is then used up."""
        for token in list(self._once):
            if _equal(given, token):
                self._once.discard(token)
                return True
        return _equal(given, self.token)

    def accepts_cookie(self, header: str) -> bool:
        """Return whether a `Cookie` header holds the token."""
        try:
            cookie = SimpleCookie(header).get(self.cookie)
        except CookieError:
            return False
        return cookie is not None and _equal(cookie.value, self.token)


class AccessControl:
    """Middleware that lets in requests with the cookie, for an allowed host, from this page.

    The token in the URL of `/` is exchanged for the cookie, and leaves the address. What changes
    something must be a POST, and must say that it comes from this page (`Origin`).

    Args:
        app: the application.
        tokens: the tokens.
        hosts: the hosts that a request may ask for.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, hosts: AllowedHosts) -> None:
        self._app, self._tokens, self._hosts = app, tokens, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._check(Request(scope))
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _check(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if host not in self._hosts:
            return _refuse(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"Host must be a name of this server, got {host[:99]!r}: start it with "
                f"--allowed-host if it is reached by that name.",
            )
        origin = request.headers.get("origin")
        changes = request.method not in _READING
        if origin != f"http://{host}" and (changes or origin is not None):
            return _refuse(HTTPStatus.FORBIDDEN, "other pages are not allowed to use this server.")
        token = request.query_params.get("token")
        if request.url.path == "/" and token is not None and not changes:
            return self._exchange(token)
        if not self._tokens.accepts_cookie(request.headers.get("cookie", "")):
            return _unauthorized()
        return None

    def _exchange(self, token: str) -> Response:
        if not self._tokens.accepts(token):
            return _unauthorized()
        response = RedirectResponse("/", status_code=HTTPStatus.SEE_OTHER)
        response.set_cookie(
            self._tokens.cookie, self._tokens.token, httponly=True, samesite="strict", path="/"
        )
        return response


def _equal(given: str, token: str) -> bool:
    # In constant time: the time of `==` would tell how long a guessed prefix is right.
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())


def _unauthorized() -> Response:
    return _refuse(
        HTTPStatus.UNAUTHORIZED,
        "This page needs its token: open the URL that 'steelyard watch' printed.",
    )


def _refuse(status: HTTPStatus, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)
