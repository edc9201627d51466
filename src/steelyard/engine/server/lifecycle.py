"""A server that runs in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn

from steelyard.engine.server.app import make_app
from steelyard.engine.server.base_models import BaseModels
from steelyard.engine.server.settings import ServerSettings, check_host
from steelyard.engine.server.state import ServerState
from steelyard.engine.service_client import LocalServiceClient
from steelyard.errors import InputError

# After the step has been finished; for replies that are under way.
_LAST_REPLIES = 5


class RunningServer:
    """The engine, the desk and the web server, from the start to the stop.

    Args:
        base_models: the names of those on offer; they are loaded before the server listens.
        host: where to listen.
        port: so too; 0 takes a free one.
        engine: arguments of `LocalServiceClient`.
        settings: of `ServerSettings`.

    Attributes:
        base_url: where clients find it.
        models: the base models on offer.
    """

    def __init__(
        self,
        base_models: Sequence[str],
        host: str,
        port: int,
        engine: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        limits = _settings(settings)
        check_host(host, limits.api_key)
        if not base_models:
            raise InputError("base_model must name at least one model, got none.")
        listening = _listen(host, port)
        try:
            service = LocalServiceClient(**engine)
            contexts = {name: service.load(name).context for name in base_models}
            self.models = BaseModels(contexts)
            self._desk = ServerState(service, self.models, limits)
            self._start(listening)
        except BaseException:
            listening.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{shown}:{listening.getsockname()[1]}"

    def stop(self) -> None:
        """Finish the step that runs, answer, and end."""
        asyncio.run_coroutine_threadsafe(self._desk.stop(), self._loop).result()
        self._server.should_exit = True
        self._thread.join()
        self._loop.close()

    def _start(self, listening: socket.socket) -> None:
        config = uvicorn.Config(
            make_app(self._desk),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_LAST_REPLIES,
        )
        self._server = _UvicornServer(config)
        self._loop = asyncio.new_event_loop()

        def work() -> None:
            self._loop.run_until_complete(self._server.serve(sockets=[listening]))

        self._thread = threading.Thread(target=work, name="steelyard-serve", daemon=True)
        self._thread.start()
        self._server.listens.wait()


class _UvicornServer(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self.listens.set()


def _settings(given: Mapping[str, Any]) -> ServerSettings:
    try:
        return ServerSettings(**given)
    except TypeError as error:
        known = sorted(ServerSettings.__dataclass_fields__)
        raise InputError(f"the settings of a server are {known}, got {sorted(given)}.") from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends without delay: else every reply takes 40 ms longer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InputError(
            f"host and port must be free to listen on, and {host}:{port} is not: {error}. "
            f"Choose another port, or stop what listens there."
        ) from error
    return listening
