"""A web server in a background thread: the engine's, and the page of `steelyard watch`."""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from steelyard.engine.server.connections import limited
from steelyard.engine.server.hosts import AllowedHosts, is_loopback
from steelyard.errors import InputError

__all__ = ["AllowedHosts", "HttpServer", "is_loopback", "listen"]

# For responses that are still being sent when the server stops.
_SHUTDOWN_SECONDS = 5


class HttpServer:
    """An application served on a socket, from construction to `stop()`.

    Args:
        app: the application; it must handle lifespan events.
        listener: the socket, see `listen`.
        name: name of the thread.
        request_seconds: time that a request may take to arrive, see `LimitedConnection`.
        max_connections: number of connections at once.

    Attributes:
        loop: the event loop that the application runs in.

    Raises:
        InputError: another server has begun to listen on the port.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        name: str,
        request_seconds: float,
        max_connections: int,
    ) -> None:
        try:
            # Linux lets two sockets bind one port as long as neither listens.
            listener.listen()
        except OSError as error:
            host, port, *_ = listener.getsockname()
            listener.close()
            raise _not_free(host, port, error) from error
        config = uvicorn.Config(
            app,
            http=limited(request_seconds, max_connections),
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        self._server = _UvicornServer(config)
        self.loop = asyncio.new_event_loop()

        def run() -> None:
            self.loop.run_until_complete(self._server.serve(sockets=[listener]))

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()
        self._server.started_listening.wait()

    def stop(self) -> None:
        """Stop listening, and wait for the responses that are being sent."""
        self._server.should_exit = True
        self._thread.join()
        self.loop.close()


class _UvicornServer(uvicorn.Server):
    """Uvicorn server with an event for the moment it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.started_listening = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then set the event."""
        await super().startup(sockets)
        self.started_listening.set()


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Socket bound to an address, and its URL; port 0 takes a free one.

    Raises:
        InputError: the address or the port cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is IPPROTO_TCP, not 0. Without it, Nagle's
    # algorithm and delayed acknowledgements add 40 ms to every response.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    # A name that cannot be one of a host is a ValueError, such as one with a label too long.
    except (OSError, OverflowError, ValueError) as error:
        listener.close()
        raise _not_free(host, port, error) from error
    url_host = f"[{host.strip('[]')}]" if ":" in host else host  # IPv6
    return listener, f"http://{url_host}:{listener.getsockname()[1]}"


def _not_free(host: str, port: int, error: Exception) -> InputError:
    return InputError(
        f"host and port must be free to listen on, and {host}:{port} is not: {error}. "
        f"Choose another port, or stop what listens there."
    )
