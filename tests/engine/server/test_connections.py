from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from steelyard.engine.server.lifecycle import RunningServer

from .wire_client import Wire, start, until

HEAD = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Server that waits for a request for half a second, with at most 20 connections."""
    folder = tmp_path_factory.mktemp("hasty")
    with start(folder, request_seconds=0.5, max_connections=20) as running:
        yield running


def connect(running: RunningServer) -> socket.socket:
    host, port = running.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(600)
    return connection


def count(running: RunningServer) -> int:
    return len(running._server._server.server_state.connections)


def closed(connection: socket.socket) -> bool:
    """Wait until the server closes a connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "sent", [b"", b"POST /api", HEAD, HEAD + b"\r\n", HEAD + b"\r\n{"], ids=repr
)
def test_a_half_open_connection_is_closed(hasty: RunningServer, sent: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(sent)
        assert closed(connection)
    until(lambda: count(hasty) == 0)


def test_a_second_request_that_does_not_arrive_is_given_up_too(hasty: RunningServer) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while b'"ok"' not in answer:
            answer += connection.recv(4096)
        connection.sendall(b"GET /api")
        while connection.recv(4096):  # the rest of the answer, then the end
            pass


def test_half_open_connections_make_room_for_new_ones(hasty: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(connect(hasty))
        for _ in range(5):
            assert httpx.get(f"{hasty.base_url}/api/v1/healthz").status_code == 200
        assert count(hasty) <= 20


def test_a_request_that_waits_for_its_result_is_not_half_open(hasty: RunningServer) -> None:
    with Wire(hasty.base_url) as wire:
        model = wire.model()
        release = [connect(hasty)]
        worker = hasty._state.runs[model].client._worker
        # The result comes when a connection that was opened before the poll has been closed.
        worker.submit(lambda: closed(release[0]))
        assert "metrics" in wire.result(wire.step(model, 1).json())
        release[0].close()


def test_a_server_stops_although_connections_are_half_open(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with start(tmp_path, request_seconds=3600.0) as running:
            connections = [stack.enter_context(connect(running)) for _ in range(3)]
            connections[0].sendall(HEAD + b"\r\n{")
            until(lambda: count(running) == 3)
        assert all(closed(connection) for connection in connections)
