"""A server in a background thread, from start to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from steelyard.engine.server.app import make_app
from steelyard.engine.server.base_models import BaseModels
from steelyard.engine.server.hosts import AllowedHosts, check_host
from steelyard.engine.server.http_server import HttpServer, listen
from steelyard.engine.server.settings import ServerSettings
from steelyard.engine.server.state import ServerState
from steelyard.engine.service_client import LocalServiceClient
from steelyard.errors import InputError


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
        listener, self.base_url = listen(host, port)
        try:
            service = LocalServiceClient(**engine)
            contexts = {name: service.load(name).context for name in base_models}
            self.models = BaseModels(contexts)
            self._state = ServerState(service, self.models, limits)
            self._server = HttpServer(
                make_app(self._state, AllowedHosts(host, limits.allowed_hosts)),
                listener,
                name="steelyard-serve",
                request_seconds=limits.request_seconds,
                max_connections=limits.max_connections,
            )
        except BaseException:
            listener.close()
            raise

    def stop(self) -> None:
        """Finish the running step, fail the queued requests, and stop listening."""
        asyncio.run_coroutine_threadsafe(self._state.stop(), self._server.loop).result()
        self._server.stop()


def _parse_settings(settings: Mapping[str, Any]) -> ServerSettings:
    try:
        return ServerSettings(**settings)
    except TypeError as error:
        known = sorted(ServerSettings.__dataclass_fields__)
        raise InputError(
            f"the settings of a server are {known}, got {sorted(settings)}."
        ) from error
