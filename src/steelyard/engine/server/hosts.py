"""Names of the server: the hosts that it may listen on, and those that a request may ask for.

A page of another site can have its own name resolved to 127.0.0.1 (DNS rebinding). The browser then
takes the requests of that page to this server for requests to its own site, and sends no `Origin`.
Only the `Host` header, which holds that name, tells them apart.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from steelyard.errors import InputError

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
        self._names = {parse_host(each) for each in [*own, *names]} - {None}

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
    found = _HOST.fullmatch(value.strip().lower())
    return None if found is None else found["address"] or found["name"]


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
