"""Limits and timeouts of a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from steelyard.engine.server.hosts import parse_host
from steelyard.errors import InputError
from steelyard.spec import is_finite, is_whole

_SECONDS = (
    "client_timeout",
    "gap_seconds",
    "keep_seconds",
    "loss_seconds",
    "poll_seconds",
    "request_seconds",
)


@dataclass(frozen=True)
class ServerSettings:
    """Limits and timeouts of a server; the defaults suit one machine and one user.

    Attributes:
        api_key: the key that clients must send; None accepts every client.
        allowed_hosts: names by which clients reach the server beside its own, as in the `Host`
            header; `"*"` allows every name.
        max_body: the largest body of a request in bytes, both as sent and decompressed.
        max_tokens: the largest number of tokens in a request; for sampling, generated ones count.
        max_models: the largest number of models in training at once.
        max_samplers: the largest number of samplers; the least recently used one is dropped.
        max_sessions: the largest number of clients at once.
        max_waiting: the largest number of queued requests of one model.
        max_rank: the largest rank of an adapter.
        max_nodes: the largest number of operations in an uploaded loss.
        max_losses: the largest number of uploaded losses in a session.
        max_loss_bytes: the largest memory of an uploaded loss, for one datum.
        max_connections: the largest number of open connections; at the limit, the one that has
            waited longest for a request is closed.
        client_timeout: seconds without a request after which a client's session ends.
        poll_seconds: seconds for which a request for a pending result is held open.
        gap_seconds: seconds for which requests wait for a missing earlier one.
        keep_seconds: seconds for which a result is kept after its first fetch.
        loss_seconds: seconds that an uploaded loss may take for a batch.
        request_seconds: seconds within which the head of a request must arrive; the body has as
            long again, and a second more for each 64 KiB.

    Raises:
        InputError: a setting breaks a rule.
    """

    api_key: str | None = None
    allowed_hosts: Sequence[str] = ()
    max_body: int = 64 * 2**20
    max_tokens: int = 2**20
    max_models: int = 64
    max_samplers: int = 64
    max_sessions: int = 1024
    max_waiting: int = 1024
    max_rank: int = 512
    max_nodes: int = 2048
    max_losses: int = 128
    max_loss_bytes: int = 2**30
    max_connections: int = 768
    client_timeout: float = 300.0
    poll_seconds: float = 20.0
    gap_seconds: float = 60.0
    keep_seconds: float = 60.0
    loss_seconds: float = 10.0
    request_seconds: float = 20.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SECONDS and not (is_finite(value) and value > 0):
                raise InputError(f"{field.name} must be a finite number > 0, got {value!r}.")
            if field.name.startswith("max_") and not is_whole(value, at_least=1):
                raise InputError(f"{field.name} must be a whole number >= 1, got {value!r}.")
        hosts = self.allowed_hosts
        is_list = isinstance(hosts, Sequence) and not isinstance(hosts, str)
        if not is_list or not all(map(_is_host, hosts)):
            raise InputError(
                f"allowed_hosts must be a list of host names such as ['gpu.example.org'], or "
                f"['*'] for all, got {hosts!r}."
            )
        # The SDK accepts no other keys, and a header carries no other characters as they are.
        if self.api_key is not None and not _is_key(self.api_key):
            raise InputError(
                "api_key must start with 'tml-', as the SDK wants it, and consist of visible ASCII "
                "characters, got one that does not."
            )


def _is_host(value: object) -> bool:
    return isinstance(value, str) and (value == "*" or parse_host(value) is not None)


def _is_key(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"tml-[!-~]*", value) is not None
