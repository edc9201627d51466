from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import httpx

from steelyard.engine.server.app import RunningServer

from .wire_client import start, until

HEAD = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"


def connect(running: RunningServer) -> socket.socket:
    host, port = running.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(600)
    return connection


def count(running: RunningServer) -> int:
    return len(running._server._server.server_state.connections)


def closed(connection: socket.socket) -> bool:
    """Wait until the server closes a connection, perhaps after a response."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_too_many_connections_are_answered_with_a_status_that_the_sdk_retries(
    tmp_path: Path,
) -> None:
    with start(tmp_path, max_connections=20) as running:
        with ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(connect(running))
            assert httpx.get(f"{running.base_url}/api/v1/healthz").status_code == 503
        until(lambda: count(running) == 0)
        assert httpx.get(f"{running.base_url}/api/v1/healthz").status_code == 200


def test_a_server_stops_although_connections_are_half_open(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with start(tmp_path) as running:
            connections = [stack.enter_context(connect(running)) for _ in range(3)]
            connections[0].sendall(HEAD + b"\r\n{")
            until(lambda: count(running) == 3)
        assert all(closed(connection) for connection in connections)
