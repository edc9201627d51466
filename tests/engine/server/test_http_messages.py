from __future__ import annotations

import asyncio
import json
from typing import Any

import pydantic
import pytest
import zstandard
from starlette.exceptions import HTTPException
from starlette.requests import Request

from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.futures import ServerFuture
from steelyard.engine.server.http_messages import (
    PROTOBUF,
    BodyTooLarge,
    EncodedResult,
    json_response,
    read_body,
    read_json,
    wait_while_connected,
)
from tests.engine.data import ragged

from .wire_client import Wire, encoded, error_of


def test_a_compressed_body_has_the_same_limit(wire: Wire, running: RunningServer) -> None:
    model = wire.model()
    body = encoded(model, 1, ragged(0, [3]))
    packed = zstandard.ZstdCompressor().compress(body)
    zipped = {"Content-Encoding": "zstd"}
    assert wire.http.post("forward_backward", content=packed, headers=zipped).status_code == 200
    bomb = zstandard.ZstdCompressor().compress(bytes(running._state.settings.max_body + 1))
    assert len(bomb) < 100_000
    response = wire.http.post("forward_backward", content=bomb, headers=zipped)
    assert response.status_code == 413
    large = encoded(model, 2, ragged(0, [3])) + bytes(running._state.settings.max_body)
    packed = zstandard.ZstdCompressor().compress(large)
    assert wire.http.post("forward_backward", content=packed, headers=zipped).status_code == 413
    assert "metrics" in wire.result(wire.step(model, 3).json()), "later requests run"
    assert "bytes unpacked" in error_of(response)
    assert wire.http.post("forward_backward", content=body, headers=zipped).status_code == 400
    unknown = wire.http.post("forward_backward", content=body, headers={"Content-Encoding": "br"})
    assert "must be zstd or identity, got 'br'" in error_of(unknown)


class Ping(pydantic.BaseModel):
    value: int


def request(*chunks: bytes, encoding: str | None = None, complete: bool = True) -> Request:
    """Request whose body arrives in chunks, and whose client then disconnects."""
    headers = [] if encoding is None else [(b"content-encoding", encoding.encode())]
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    if complete:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    messages.append({"type": "http.disconnect"})
    remaining = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(remaining)

    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def test_a_body_is_joined_and_decompressed() -> None:
    assert asyncio.run(read_body(request(b"ab", b"cd"), 4)) == b"abcd"
    packed = zstandard.ZstdCompressor().compress(b"x" * 100)
    whole = asyncio.run(read_body(request(packed[:5], packed[5:], encoding=" ZSTD "), 100))
    assert whole == b"x" * 100


def test_a_body_over_the_limit_is_a_413_with_its_first_bytes() -> None:
    with pytest.raises(BodyTooLarge, match="at most 4 bytes") as error:
        asyncio.run(read_body(request(b"ab", b"cde"), 4))
    assert (error.value.status_code, error.value.prefix) == (413, b"abcde")
    ends = b'{"a": 1' + b" " * 5000 + b'"b": 2}'
    with pytest.raises(BodyTooLarge) as error:
        asyncio.run(read_body(request(ends[:3000], ends[3000:]), 2000))
    assert error.value.prefix == ends[:1024]
    assert error.value.suffix == ends[-1024:]


def test_a_body_that_breaks_off_is_a_400() -> None:
    with pytest.raises(HTTPException, match="must be whole") as error:
        asyncio.run(read_body(request(b"ab", complete=False), 4))
    assert error.value.status_code == 400


def test_a_json_body_is_parsed() -> None:
    assert asyncio.run(read_json(request(b'{"value": 3}'), Ping, 99)) == Ping(value=3)
    with pytest.raises(HTTPException, match=r"Ping\.value is not right"):
        asyncio.run(read_json(request(b'{"value": "x"}'), Ping, 99))


def test_waiting_ends_with_the_result_or_the_connection() -> None:
    cancelled: list[bool] = []

    async def value() -> int:
        return 3

    async def forever() -> int:
        try:
            return await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    async def run() -> tuple[int | None, int | None]:
        connected: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        scope = {"type": "http", "method": "POST", "headers": []}
        open_request = Request(scope, lambda: asyncio.shield(connected))
        closed = request()
        await closed.body()
        results = (
            await wait_while_connected(open_request, value()),
            await wait_while_connected(closed, forever()),
        )
        await asyncio.sleep(0)  # the cancelled task ends
        return results

    assert asyncio.run(run()) == (3, None)
    assert cancelled == [True]


def test_responses_have_the_formats_of_the_sdk() -> None:
    future = ServerFuture("m:1", "forward", "s")
    response = json_response(future.reference("m", ["m:1:0"]))
    assert json.loads(bytes(response.body)) == {
        "request_id": "m:1",
        "model_id": "m",
        "sample_sequence_ids": ["m:1:0"],
    }
    assert json_response(Ping(value=1)).body == b'{"value":1}'
    protobuf = EncodedResult(b"\x00", PROTOBUF).response()
    assert (protobuf.body, protobuf.media_type) == (b"\x00", "application/x-protobuf")
