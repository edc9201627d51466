from __future__ import annotations

import socket

import pytest

from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import ragged

from .training_requests import STEPS, losses_of, send
from .wire_client import Wire, encoded


def test_a_broken_connection_leaves_no_request_half_queued(
    running: RunningServer, wire: Wire, reference: list[float]
) -> None:
    model = wire.model()
    body = encoded(model, 1, ragged(0, [4, 3]))
    host, port = running.base_url.removeprefix("http://").split(":")
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    for sent in (head, head + body[: len(body) // 2], head + body):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    futures = {number: send(wire, model, number) for number in range(1, 2 * STEPS + 1)}
    assert losses_of(wire, futures) == pytest.approx(reference, abs=1e-5)
