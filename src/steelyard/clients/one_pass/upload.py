"""Upload of losses: each graph once in a session of the SDK, with the refusals remembered."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from steelyard.clients.one_pass.loss_graph import LossGraph

NOT_RUN = "the server does not run uploaded losses"


class RefusedError(Exception):
    """The server, or the SDK, does not take a loss; the message says why."""


class SessionLosses:
    """Losses of one session: handles, and the reasons of refusals, by graph.

    The SDK takes a graph only once in a session, also if the server refused it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[Any, Any] = {}


_SESSIONS: WeakKeyDictionary[Any, SessionLosses] = WeakKeyDictionary()
_SESSIONS_LOCK = threading.Lock()


class Uploader:
    """Uploads losses for a training client; all clients of a session share what is known.

    Args:
        client: the training client.
        service: the service client that made it, whose verb uploading is; None: the losses go
            through the training client, if it is one of the SDK.
    """

    def __init__(self, client: Any, service: Any = None) -> None:
        self._create = getattr(service, "create_custom_loss", None) or _creator(client)
        own = getattr(client, "holder", None)
        self._holder = own if service is None else getattr(service, "holder", None)
        self._elsewhere = None not in (own, self._holder) and own is not self._holder
        with _SESSIONS_LOCK:
            key = self if self._holder is None else self._holder
            self._losses = _SESSIONS.setdefault(key, SessionLosses())

    def why_not(self) -> str | None:
        """Reason for which no loss can be uploaded; None if there is none."""
        if self._create is None:
            return "the client cannot upload losses: pass service=, the client that made it"
        if self._elsewhere:
            return "the service has another session than the client: pass the one that made it"
        config = getattr(self._holder, "get_client_config", None)
        # Where the server does not run losses, the SDK makes two passes and does not say so.
        runs = config is not None and getattr(config(), "custom_loss_server_side", False)
        return None if runs else NOT_RUN

    def upload(self, graph: LossGraph) -> Any:
        """Handle of a loss; it waits for the server the first time.

        Raises:
            RefusedError: the server or the SDK does not take it, now or before.
        """
        with self._losses.lock:
            if graph.key not in self._losses.known:
                try:
                    self._losses.known[graph.key] = self._upload(graph)
                except RefusedError as error:
                    self._losses.known[graph.key] = str(error)
            known = self._losses.known[graph.key]
        if isinstance(known, str):
            raise RefusedError(known)
        return known

    def refuse(self, graph: LossGraph, reason: str) -> None:
        """Remember that the server did not run a loss as it promised."""
        with self._losses.lock:
            self._losses.known[graph.key] = reason

    def _upload(self, graph: LossGraph) -> Any:
        try:
            # Present: `why_not` has been asked.
            handle = self._create(graph.function(), dict(graph.ranks)).result()  # type: ignore[misc]
        except Exception as error:  # the SDK is alpha: whatever it raises, two passes still work
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RefusedError(reason) from error
        if handle.loss_id is None:
            raise RefusedError(NOT_RUN)
        return handle


def _creator(client: Any) -> Callable[..., Any] | None:
    """Upload through a training client of the SDK: the service's verb, in the same session."""
    tinker = sys.modules.get("tinker")  # loaded, if the client is the SDK's
    submit = getattr(getattr(tinker, "ServiceClient", None), "_create_custom_loss_submit", None)
    if tinker is None or submit is None or not isinstance(client, tinker.TrainingClient):
        return None
    return lambda fn, ranks: submit(client, fn, ranks)
