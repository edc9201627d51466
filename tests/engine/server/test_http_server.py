"""The web server in a thread, by itself."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from steelyard.engine.server.http_server import HttpServer, listen
from steelyard.errors import InputError


async def hello(_: Request) -> Response:
    return PlainTextResponse("hello")


def start(host: str) -> tuple[HttpServer, str]:
    listener, url = listen(host, 0)
    app = Starlette(routes=[Route("/", hello)])
    return HttpServer(app, listener, name="steelyard-test", max_connections=4), url


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("[::1]", "[::1]")]
)
def test_an_application_is_served_until_it_is_stopped(host: str, shown: str) -> None:
    server, url = start(host)
    assert url.startswith(f"http://{shown}:")
    assert httpx.get(url).text == "hello"
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert "steelyard-test" not in {thread.name for thread in threading.enumerate()}


def test_a_port_that_is_taken_is_named() -> None:
    server, url = start("127.0.0.1")
    port = int(url.rpartition(":")[2])
    with pytest.raises(InputError, match=f"127.0.0.1:{port} is not: .* Choose another port"):
        listen("127.0.0.1", port)
    server.stop()


def test_a_port_that_two_servers_have_bound_belongs_to_the_first_that_listens() -> None:
    (first, url), app = listen("127.0.0.1", 0), Starlette(routes=[Route("/", hello)])
    port = first.getsockname()[1]
    second, _ = listen("127.0.0.1", port)
    limits: Any = {"name": "steelyard-test", "max_connections": 4}
    server = HttpServer(app, first, **limits)
    with pytest.raises(InputError, match=f"127.0.0.1:{port} is not: .* Choose another port"):
        HttpServer(app, second, **limits)
    assert httpx.get(url).text == "hello"
    server.stop()


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
def test_a_host_that_can_be_none_is_named(host: str) -> None:
    with pytest.raises(InputError, match="host and port must be free to listen on"):
        listen(host, 0)
