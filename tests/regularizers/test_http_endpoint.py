"""Requests to a real server on loopback: retries, limits, sessions. See `http_server.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from steelyard.errors import TermError
from steelyard.regularizers.json_service import (
    Endpoint,
    ServiceOptions,
    _redirect_target,
    _retry_after,
)

from .http_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def endpoint(url: str, *, follow_redirects: bool = False, **limits: Any) -> Endpoint:
    options: dict[str, Any] = {
        "url": url,
        "headers": {"X-Token": "t0ken"},
        "follow_redirects": follow_redirects,
        "concurrency": 4,
        "request_timeout": 600.0,
        "retries": 2,
        "backoff": 0.001,
        "max_backoff": 5.0,
        "max_bytes": 65_536,
        **limits,
    }
    return Endpoint(ServiceOptions(**options))


def post(target: Endpoint, *bodies: Any) -> list[tuple[Any, int]]:
    async def run() -> list[tuple[Any, int]]:
        session = await target.session()
        try:
            calls = [target.post(session, json.dumps(body)) for body in bodies]
            return [(found.content, found.retries) for found in await asyncio.gather(*calls)]
        finally:
            await session.close()

    return asyncio.run(run())


def test_the_parsed_response_and_the_number_of_retries(server: Server) -> None:
    assert post(endpoint(server.url("check")), {"penalty": 2}) == [({"penalty": 2, "why": ""}, 0)]
    assert post(endpoint(server.url("busy")), {"times": 2}) == [({"penalty": 0.5}, 2)]
    assert server.headers[0]["x-token"] == "t0ken"
    assert server.headers[0]["accept-encoding"] == "identity"


def test_retries_end(server: Server) -> None:
    with pytest.raises(TermError, match=r"^got status 503 in 3 attempts$"):
        post(endpoint(server.url("down")), {"times": 9})
    assert server.seen["down"] == 3


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("refused", "got status 403"), ("garbage", "got something that is no JSON")],
)
def test_a_final_failure_is_not_retried(server: Server, behaviour: str, message: str) -> None:
    with pytest.raises(TermError, match=f"^{message}$"):
        post(endpoint(server.url(behaviour)), {})
    assert server.seen[behaviour] == 1


SECRETS = {"authorization", "cookie", "x-token"}


@pytest.mark.parametrize("status", [307, 308])
def test_a_redirect_within_the_origin_repeats_the_whole_request(
    server: Server, status: int
) -> None:
    target = endpoint(server.url("redirect", user="me:hunter2@"), follow_redirects=True)
    body = {"status": status, "location": "/check?a=b#part", "penalty": 2}
    assert post(target, body) == [({"penalty": 2, "why": ""}, 0)]
    assert (server.methods, server.paths) == (["POST", "POST"], ["/redirect", "/check?a=b"])
    assert server.requests == [body, body]
    for headers in server.headers:
        assert headers["x-token"] == "t0ken"
        assert headers["authorization"].startswith("basic ")


def test_nothing_secret_is_sent_to_another_origin(server: Server) -> None:
    """The other server has another port, and the same host, for which cookies would be valid."""
    target = endpoint(server.url("redirect", user="me:hunter2@"), follow_redirects=True)
    with Server() as other:
        body = {"location": other.url("check", user="you:theirs@"), "penalty": 2}
        assert post(target, body, body) == 2 * [({"penalty": 2, "why": ""}, 0)]
    assert (other.methods, other.requests) == (["POST", "POST"], [body, body])
    for headers in other.headers:
        assert headers["content-type"] == "application/json"
        assert headers["accept-encoding"] == "identity", "the size limit needs it"
        assert not SECRETS & headers.keys()


def test_another_host_name_is_another_origin(server: Server) -> None:
    here = server.url("check").replace("127.0.0.1", "localhost")
    assert post(endpoint(server.url("redirect"), follow_redirects=True), {"location": here})
    assert "x-token" in server.headers[0]
    assert not SECRETS & server.headers[1].keys()


def test_a_redirect_back_does_not_bring_the_secrets_back(server: Server) -> None:
    """The other server chose the path there."""
    target = endpoint(server.url("redirect"), follow_redirects=True)
    with Server() as other:
        other.relay = server.url("check")
        post(target, {"location": other.url("relay")})
    assert server.paths == ["/redirect", "/check"]
    assert not SECRETS & server.headers[1].keys()


def test_cookies_are_not_kept(server: Server) -> None:
    target = endpoint(server.url("redirect"), follow_redirects=True)
    post(target, {"location": "/check"}, {"location": "/check"})
    assert not [headers for headers in server.headers if "cookie" in headers]


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirect_that_would_become_a_get_is_an_error(server: Server, status: int) -> None:
    with pytest.raises(
        TermError, match=f"^got status {status}, a redirect that would not repeat the POST request$"
    ):
        post(
            endpoint(server.url("redirect"), follow_redirects=True),
            {"status": status, "location": "/check"},
        )
    assert (server.methods, server.paths) == (["POST"], ["/redirect"])


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("ftp://me:hunter2@host/check", "got status 307 without an address to go to"),
        ("mailto:me", "got InvalidURL"),
    ],
)
@pytest.mark.parametrize("follow", [True, False])
def test_a_redirect_to_something_else_is_an_error_that_does_not_show_it(
    server: Server, location: str, message: str, follow: bool
) -> None:
    expected = message if follow or "InvalidURL" in message else "got status 307"
    with pytest.raises(TermError, match=f"^{expected}$"):
        post(endpoint(server.url("redirect"), follow_redirects=follow), {"location": location})
    assert server.seen["redirect"] == 1, "not retried"


def test_a_redirect_from_https_to_http_is_an_error() -> None:
    request = httpx.Request("POST", "https://host/check")
    response = httpx.Response(308, headers={"Location": "http://host/check"}, request=request)
    with pytest.raises(TermError, match=r"^got status 308, a redirect from https to http$"):
        _redirect_target(response)


@pytest.mark.parametrize(("max_bytes", "fits"), [(16, True), (15, False)])
def test_the_size_limit_is_exact(server: Server, max_bytes: int, fits: bool) -> None:
    limited = endpoint(server.url("busy"), max_bytes=max_bytes)
    if fits:
        assert post(limited, {"times": 0}) == [({"penalty": 0.5}, 0)]
    else:
        with pytest.raises(TermError, match=r"^got more than max_bytes=15$"):
            post(limited, {"times": 0})


def test_concurrent_requests_use_all_connections_and_no_more(server: Server) -> None:
    bodies = [{"wait_for": 3, "penalty": number} for number in range(9)]
    responses = post(endpoint(server.url("together"), concurrency=3), *bodies)
    assert [response["penalty"] for response, _ in responses] == list(range(9))
    assert (server.most_in_flight, server.connections) == (3, 3)


def test_closing_a_session_closes_its_connections(server: Server) -> None:
    post(endpoint(server.url("check")), {})
    server.wait_until_alone()


def test_a_session_that_is_not_closed_ends_with_its_loop(server: Server) -> None:
    target = endpoint(server.url("check"))

    async def leave_open() -> Any:
        session = await target.session()
        await target.post(session, "{}")
        return session

    session = asyncio.run(leave_open())
    server.wait_until_alone()
    assert session.client.is_closed


def test_the_public_url_has_no_secrets(server: Server) -> None:
    target = endpoint(server.url("check", user="me:hunter2@", query="?key=s3cr3t#part"))
    assert target.public_url == server.url("check")
    post(target, {})
    assert server.paths == ["/check?key=s3cr3t"]
    assert server.headers[0]["authorization"] == "basic bwu6ahvudgvymg=="  # lower-cased by Server


def test_pauses_grow_and_stay_within_bounds() -> None:
    target = endpoint("http://host", backoff=1.0, max_backoff=5.0)
    for attempt, (low, high) in enumerate([(0.5, 1), (1, 2), (2, 4), (4, 5), (5, 5)], start=1):
        pauses = {target._pause(attempt, 0.0) for _ in range(50)}
        assert low <= min(pauses) <= max(pauses) <= high
        assert attempt == 5 or len(pauses) > 1
    assert target._pause(1, 3.0) == 3.0
    assert target._pause(1, 60.0) == 5.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        ("2", 2.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("nan", 0.0),
        ("soon", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00", 0.0),
    ],
)
def test_retry_after_in_seconds(header: str | None, seconds: float) -> None:
    assert _retry_after(header) == seconds


def test_retry_after_as_a_date() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 90 < _retry_after(later) <= 100
