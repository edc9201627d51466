"""A real HTTP server on loopback with correct, slow, invalid, endless and missing responses."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Self

Response = tuple[int, dict[str, str], bytes]


class Server:
    """Serves `/<behaviour>` and records requests and connections. Use it as a context manager."""

    def __init__(self) -> None:
        self.connections = 0
        self.open = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.methods: list[str] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.requests: list[Any] = []
        self.relay = ""  # where `/relay` redirects to
        self.seen: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._handlers: dict[str, Callable[[Any], Awaitable[Response]]] = {
            "check": self._check,
            "slow": self._slow,
            "together": self._together,
        }

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def url(self, behaviour: str, *, user: str = "", query: str = "") -> str:
        return f"http://{user}127.0.0.1:{self._port}/{behaviour}{query}"

    def wait_until_alone(self) -> None:
        """Wait until the server has seen all connections close."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.open == 0, timeout=600)

    def wait_for_visitors(self, count: int) -> None:
        """Wait until so many connections have come, and all are closed."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.connections >= count and self.open == 0, timeout=600
            )

    def _count(self, more: int) -> None:
        with self._changed:
            self.open += more
            self._changed.notify_all()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._gate = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connected(self, reader: Any, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._count(1)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._handle(reader, writer):
                    pass
        finally:
            writer.transport.abort()  # closing would wait for a reader that has gone
            self._count(-1)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Handle one request; return whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = json.loads(body or b"{}")  # a GET has no body
        self.methods.append(method)
        self.paths.append(path)
        self.headers.append(headers)
        self.requests.append(request)
        behaviour = path.strip("/").partition("?")[0]
        self.seen[behaviour] += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._respond(behaviour, request, reader, writer)
        finally:
            self.in_flight -= 1

    async def _respond(
        self,
        behaviour: str,
        request: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        if behaviour == "hangup":
            return False
        if behaviour == "silent":
            return bool(await reader.read())  # until the other side hangs up
        if behaviour in ("endless", "drip"):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            size = 10_000 if behaviour == "endless" else 1
            while True:
                writer.write(b"%x\r\n%s\r\n" % (size, b" " * size))
                await writer.drain()
                await asyncio.sleep(0.001)
        if behaviour in self._handlers:
            status, headers, body = await self._handlers[behaviour](request)
        else:
            status, headers, body = self._fixed(behaviour, request)
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        return True

    async def _check(self, request: Any) -> Response:
        return 200, {}, json.dumps({"penalty": request.get("penalty", 0.5), "why": ""}).encode()

    async def _slow(self, request: Any) -> Response:
        await asyncio.sleep(request["seconds"])
        return await self._check(request)

    async def _together(self, request: Any) -> Response:
        """Respond only once `wait_for` requests are in flight."""
        if self.in_flight >= request["wait_for"]:
            self._gate.set()
        await self._gate.wait()
        return await self._check(request)

    def _fixed(self, behaviour: str, request: Any) -> Response:
        good = json.dumps({"penalty": 0.5}).encode()
        first = self.seen[behaviour] <= request.get("times", 1)
        responses: dict[str, Response] = {
            "busy": (429, {}, b"") if first else (200, {}, good),
            "busy_for": (429, {"Retry-After": request.get("after", "")}, b"")
            if first
            else (200, {}, good),
            "down": (503, {}, b"") if first else (200, {}, good),
            "broken": (500, {}, b"secret stack trace"),
            "refused": (403, {}, b"secret"),
            "moved": (307, {"Location": "/check"}, b""),
            "redirect": (
                request.get("status", 307),
                {"Location": request.get("location", ""), "Set-Cookie": "session=c00kie"},
                b"",
            ),
            "relay": (307, {"Location": self.relay}, b""),
            "redirect_loop": (307, {"Location": "/redirect_loop"}, b""),
            "garbage": (200, {}, b"\xff\xfe<html>secret"),
            "deep": (200, {}, b"[" * 60_000),
            "list": (200, {}, b"[0.5]"),
            "empty": (200, {}, b""),
            "no_content": (204, {}, b""),
            "other": (200, {}, b'{"score": 1}'),
            "nan": (200, {}, b'{"penalty": NaN}'),
            "huge": (200, {}, b'{"penalty": 1e999}'),
            "text": (200, {}, b'{"penalty": "0.5"}'),
            "true": (200, {}, b'{"penalty": true}'),
            "null": (200, {}, b'{"penalty": null}'),
            "long": (200, {}, b" " * 70_000 + good),
            "zipped": (200, {"Content-Encoding": "gzip"}, gzip.compress(good)),
        }
        return responses[behaviour]
