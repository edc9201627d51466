"""What a server allows, and how long it waits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields

from steelyard.errors import InputError
from steelyard.spec import is_finite, is_whole

_SECONDS = ("client_timeout", "poll_seconds", "gap_seconds", "keep_seconds")


@dataclass(frozen=True)
class ServerSettings:
    """The limits of a server; every one has a default that suits one machine and one user.

    Attributes:
        api_key: what clients must send; None lets everybody in who reaches the server.
        max_body: the most bytes of a request, as sent and unpacked.
        max_tokens: the most tokens of a request; of a sampling request, those it may make count.
        max_models: the most models in training at once.
        max_samplers: the most samplers at once; the one that was used longest ago makes room.
        max_sessions: the most clients at once.
        max_waiting: the most requests of one model that wait for their turn.
        max_rank: the highest rank of an adapter.
        max_nodes: the most operations of an uploaded loss.
        max_losses: the most uploaded losses of one session.
        client_timeout: seconds of silence after which a client counts as gone.
        poll_seconds: how long a request for a result that is not there yet is held.
        gap_seconds: how long requests wait for one with a smaller number that is missing.
        keep_seconds: how long a result is kept once it was fetched, for those who ask twice.

    Raises:
        InputError: a setting breaks a rule.
    """

    api_key: str | None = None
    max_body: int = 64 * 2**20
    max_tokens: int = 2**20
    max_models: int = 64
    max_samplers: int = 64
    max_sessions: int = 1024
    max_waiting: int = 1024
    max_rank: int = 512
    max_nodes: int = 2048
    max_losses: int = 128
    client_timeout: float = 300.0
    poll_seconds: float = 20.0
    gap_seconds: float = 60.0
    keep_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SECONDS and not (is_finite(value) and value > 0):
                raise InputError(f"{field.name} must be a finite number > 0, got {value!r}.")
            if field.name.startswith("max_") and not is_whole(value, at_least=1):
                raise InputError(f"{field.name} must be a whole number >= 1, got {value!r}.")
        # The SDK refuses to send any other.
        if self.api_key is not None and not self.api_key.startswith("tml-"):
            raise InputError(
                "api_key must start with 'tml-', as the SDK wants it, got one that does not."
            )


def check_host(host: str, api_key: str | None) -> None:
    """Nothing, if a server may listen on `host`.

    Raises:
        InputError: others can reach it, and there is no key.
    """
    if api_key is None and not is_loopback(host):
        raise InputError(
            f"host must be a loopback address such as 127.0.0.1 unless there is an API key, "
            f"got {host!r}: pass api_key (--api-key), or others could use this machine."
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
