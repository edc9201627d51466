"""A server in a background thread, from start to stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn

from steelyard.engine.server.app import make_app
from steelyard.engine.server.base_models import BaseModels
from steelyard.engine.server.connections import limited
from steelyard.engine.server.hosts import AllowedHosts, check_host
from steelyard.engine.server.settings import ServerSettings
from steelyard.engine.server.state import ServerState
from steelyard.engine.service_client import LocalServiceClient
from steelyard.errors import InputError

# For responses that are still being sent when the server stops.
_SHUTDOWN_SECONDS = 5


class RunningServer:
    """The engine, the server state and the web server.

    Args:
        base_models: the names of the models on offer; they are loaded before the server listens.
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one.
        engine: arguments of `LocalServiceClient`.
        settings: arguments of `ServerSettings`.

    Attributes:
        base_url: the URL for clients.
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
        limits = _parse_settings(settings)
        check_host(host, limits.api_key)
        if not base_models:
            raise InputError("base_model must name at least one model, got none.")
        listener = _listen(host, port)
        try:
            service = LocalServiceClient(**engine)
            contexts = {name: service.load(name).context for name in base_models}
            self.models = BaseModels(contexts)
            self._state = ServerState(service, self.models, limits)
            self._start(listener, AllowedHosts(host, limits.allowed_hosts))
        except BaseException:
            listener.close()
            raise
        url_host = f"[{host}]" if ":" in host else host  # IPv6
        self.base_url = f"http://{url_host}:{listener.getsockname()[1]}"

    def stop(self) -> None:
        """Finish the running step, fail the queued requests, and stop listening."""
        asyncio.run_coroutine_threadsafe(self._state.stop(), self._loop).result()
        self._server.should_exit = True
        self._thread.join()
        self._loop.close()

    def _start(self, listener: socket.socket, hosts: AllowedHosts) -> None:
        limits = self._state.settings
        config = uvicorn.Config(
            make_app(self._state, hosts),
            http=limited(limits.request_seconds, limits.max_connections),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        self._server = _UvicornServer(config)
        self._loop = asyncio.new_event_loop()

        def run() -> None:
            self._loop.run_until_complete(self._server.serve(sockets=[listener]))

        self._thread = threading.Thread(target=run, name="steelyard-serve", daemon=True)
        self._thread.start()
        self._server.started_listening.wait()


class _UvicornServer(uvicorn.Server):
    """Uvicorn server with an event for the moment it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.started_listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then set the event."""
        await super().startup(sockets)
        self.started_listening.set()


def _parse_settings(settings: Mapping[str, Any]) -> ServerSettings:
    try:
        return ServerSettings(**settings)
    except TypeError as error:
        known = sorted(ServerSettings.__dataclass_fields__)
        raise InputError(
            f"the settings of a server are {known}, got {sorted(settings)}."
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is IPPROTO_TCP, not 0. Without it, Nagle's
    # algorithm and delayed acknowledgements add 40 ms to every response.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(
            f"host and port must be free to listen on, and {host}:{port} is not: {error}. "
            f"Choose another port, or stop what listens there."
        ) from error
    return listener
