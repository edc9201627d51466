"""The web server in a thread, by itself."""

from __future__ import annotations

import threading

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
    limits = {"request_seconds": 5.0, "max_connections": 4}
    return HttpServer(app, listener, name="steelyard-test", **limits), url  # type: ignore[arg-type]  # numbers of two types


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
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
