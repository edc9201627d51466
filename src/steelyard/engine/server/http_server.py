"""A web server in a background thread: the engine's, and the page of `steelyard watch`."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Iterable

import uvicorn
from starlette.types import ASGIApp

from steelyard.errors import InputError

# For responses that are still being sent when the server stops.
_SHUTDOWN_SECONDS = 5
_POLL_SECONDS = 0.001  # between two looks whether uvicorn has started: it has no event for that


class HttpServer:
    """An application served on a socket, from construction to `stop()`.

    Args:
        app: the application; it must handle lifespan events.
        listener: the socket, see `listen`.
        name: name of the thread.
        max_connections: number of connections from which on requests are answered with 503.

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
            http="h11",
            limit_concurrency=max_connections,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self.loop = asyncio.new_event_loop()

        def run() -> None:
            self.loop.run_until_complete(self._server.serve(sockets=[listener]))

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stop listening, and wait for the responses that are being sent."""
        self._server.should_exit = True
        self._thread.join()
        self.loop.close()


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


# RFC 9110, 7.2, without the user part.
_HOST = re.compile(
    r"(\[(?P<address>[0-9a-f:.]+(%[\w.-]+)?)\]|(?P<name>[\w-]+(\.[\w-]+)*)\.?)(:\d{1,5})?"
)


class AllowedHosts:
    """Hosts that a request may ask for, of a server that listens on `host`.

    They are `localhost`, the addresses of loopback, `host` and the additional names. A server that
    other machines can reach also has the name of this machine, and every address: behind NAT it
    cannot know its own, and rebinding needs a name. The port is not compared, as that of a tunnel
    may differ.

    Args:
        host: the address that the server listens on.
        names: additional names; `"*"` allows all.
    """

    def __init__(self, host: str, names: Iterable[str] = ()) -> None:
        self._all = "*" in names
        own = [f"[{host}]" if ":" in host and "[" not in host else host, "localhost"]
        self._on_loopback = is_loopback(host)
        if not self._on_loopback:
            own.append(socket.gethostname())
        self._names = {parse_host(allowed) for allowed in [*own, *names]} - {None}

    def __contains__(self, header: object) -> bool:
        """Return whether the value of a `Host` header is allowed."""
        if self._all:
            return True
        name = parse_host(str(header))
        if name is None or name in self._names:
            return name is not None
        return is_loopback(name) or (not self._on_loopback and _is_address(name))


def parse_host(value: str) -> str | None:
    """Host of a `Host` header in lower case, without the port; None if it is malformed.

    An IPv6 address is in brackets there, and is returned without them.
    """
    match = _HOST.fullmatch(value.strip().lower())
    return None if match is None else match["address"] or match["name"]


def check_host(host: str, api_key: str | None) -> None:
    """Check that a server is safe to listen on `host`.

    Raises:
        InputError: other machines can reach it, and there is no key.
    """
    if api_key is None and not is_loopback(host):
        raise InputError(
            f"host must be a loopback address such as 127.0.0.1 unless there is an API key, "
            f"got {host!r}: pass api_key (--api-key), or others could use this machine."
        )


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_address(name: str) -> bool:
    try:
        return not ipaddress.ip_address(name).is_unspecified
    except ValueError:
        return False
