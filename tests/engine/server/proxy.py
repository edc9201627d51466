"""Proxy that drops responses of a server, to simulate a connection that breaks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Proxy:
    """TCP proxy that drops the given number of responses of each endpoint."""

    def __init__(self, port: int, losses: dict[str, int]) -> None:
        self.losses = dict(losses)
        self._port = port

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, server = await asyncio.open_connection("127.0.0.1", self._port)
        sent: list[bytes] = []

        async def forward_requests() -> None:
            while data := await reader.read(2**16):
                sent.append(data)
                server.write(data)
                await server.drain()

        async def forward_responses() -> None:
            while data := await upstream.read(2**16):
                if self._drops(b"".join(sent)):
                    return
                sent.clear()
                writer.write(data)
                await writer.drain()

        tasks = [
            asyncio.ensure_future(forward_requests()),
            asyncio.ensure_future(forward_responses()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for each in (server, writer):
                each.transport.abort()

    def _drops(self, sent: bytes) -> bool:
        for endpoint, left in self.losses.items():
            if left and f"/api/v1/{endpoint} ".encode() in sent:
                self.losses[endpoint] -= 1
                return True
        return False


@contextmanager
def proxy(base_url: str, losses: dict[str, int]) -> Iterator[tuple[str, Proxy]]:
    """Run a proxy in front of a server; yields its URL and itself."""
    started = Proxy(int(base_url.rpartition(":")[2]), losses)
    ports: list[int] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with await asyncio.start_server(started.carry, "127.0.0.1", 0) as listening:
            ports.append(listening.sockets[0].getsockname()[1])
            ready.set()
            await stop.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # the connections close

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}", started
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
