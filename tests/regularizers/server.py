"""A real HTTP server on loopback that answers well, slowly, wrongly, endlessly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Self

Answer = tuple[int, dict[str, str], bytes]


class Server:
    """Serves `/<behaviour>`; counts what it saw. Use it as a context manager."""

    def __init__(self) -> None:
        self.connections = 0
        self.open = 0
        self.under_way = 0
        self.most_under_way = 0
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.questions: list[Any] = []
        self.seen: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._handlers: dict[str, Callable[[Any], Awaitable[Answer]]] = {
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
        """Until the server too has seen that no connection is left."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.open == 0, timeout=600)

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
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.transport.abort()  # closing would wait for a reader that has gone
            self._count(-1)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection lives on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split(" ")[1]
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        question = json.loads(await reader.readexactly(int(headers.get("content-length", 0))))
        self.paths.append(path)
        self.headers.append(headers)
        self.questions.append(question)
        behaviour = path.strip("/").partition("?")[0]
        self.seen[behaviour] += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._answer(behaviour, question, reader, writer)
        finally:
            self.under_way -= 1

    async def _answer(
        self,
        behaviour: str,
        question: Any,
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
            status, headers, body = await self._handlers[behaviour](question)
        else:
            status, headers, body = self._fixed(behaviour, question)
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
        lines += [f"{key}: {value}" for key, value in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        return True

    async def _check(self, question: Any) -> Answer:
        return 200, {}, json.dumps({"penalty": question.get("penalty", 0.5), "why": ""}).encode()

    async def _slow(self, question: Any) -> Answer:
        await asyncio.sleep(question["seconds"])
        return await self._check(question)

    async def _together(self, question: Any) -> Answer:
        """Answers nobody before as many are here as the question says."""
        if self.under_way >= question["wait_for"]:
            self._gate.set()
        await self._gate.wait()
        return await self._check(question)

    def _fixed(self, behaviour: str, question: Any) -> Answer:
        good = json.dumps({"penalty": 0.5}).encode()
        first = self.seen[behaviour] <= question.get("times", 1)
        answers: dict[str, Answer] = {
            "busy": (429, {}, b"") if first else (200, {}, good),
            "busy_for": (429, {"Retry-After": question.get("after", "")}, b"")
            if first
            else (200, {}, good),
            "down": (503, {}, b"") if first else (200, {}, good),
            "broken": (500, {}, b"secret stack trace"),
            "refused": (403, {}, b"secret"),
            "moved": (307, {"Location": "/check"}, b""),
            "round": (307, {"Location": "/round"}, b""),
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
        return answers[behaviour]
