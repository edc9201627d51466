"""A connection that breaks: what the server says is lost on its way, when it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Proxy:
    """Between a client and a server; for each verb named, so many replies are lost."""

    def __init__(self, port: int, losses: dict[str, int]) -> None:
        self.losses = dict(losses)
        self._port = port

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, server = await asyncio.open_connection("127.0.0.1", self._port)
        asked: list[bytes] = []

        async def there() -> None:
            while data := await reader.read(2**16):
                asked.append(data)
                server.write(data)
                await server.drain()

        async def back() -> None:
            while data := await upstream.read(2**16):
                if self._lost(b"".join(asked)):
                    return
                asked.clear()
                writer.write(data)
                await writer.drain()

        tasks = [asyncio.ensure_future(there()), asyncio.ensure_future(back())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for each in (server, writer):
                each.transport.abort()

    def _lost(self, asked: bytes) -> bool:
        for verb, left in self.losses.items():
            if left and f"/api/v1/{verb} ".encode() in asked:
                self.losses[verb] -= 1
                return True
        return False


@contextmanager
def proxy(base_url: str, losses: dict[str, int]) -> Iterator[tuple[str, Proxy]]:
    """A proxy before a server, and its URL."""
    made = Proxy(int(base_url.rpartition(":")[2]), losses)
    ports: list[int] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with await asyncio.start_server(made.carry, "127.0.0.1", 0) as listening:
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
        yield f"http://127.0.0.1:{ports[0]}", made
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
