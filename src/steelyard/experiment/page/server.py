"""The page of a folder of runs, served by a thread of this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from steelyard._extras import cure
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.page.run_views import RunViews

if TYPE_CHECKING:
    from steelyard.experiment.page.security import Tokens

_MAX_CONNECTIONS = 256


@dataclass(frozen=True)
class WatchPage:
    """A page that is being served.

    Attributes:
        base_url: its URL without the token.
        folder: the folder of the runs, as an absolute path.
        tokens: its tokens.
        is_local: whether only this machine can reach it.
    """

    base_url: str
    folder: Path
    tokens: Tokens
    is_local: bool

    @property
    def tunnel(self) -> str:
        """Command that makes the page reachable at the same URL on another machine."""
        port = urlsplit(self.base_url).port
        return f"ssh -L {port}:localhost:{port} {socket.gethostname()}"

    def url(self, run: str | None = None, *, once: bool = False) -> str:
        """URL that opens the page.

        Args:
            run: the run to show, a path below the folder; None shows the list.
            once: whether the URL works only once.
        """
        token = self.tokens.for_one_use() if once else self.tokens.token
        # A browser keeps the fragment through the redirect that removes the token.
        return f"{self.base_url}/?token={token}" + (f"#run={quote(run)}" if run else "")


@contextmanager
def serve_page(
    folder: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allowed_hosts: Sequence[str] = (),
) -> Iterator[WatchPage]:
    """Serve the page of the runs in a folder for the duration of a `with` block.

    Args:
        folder: the folder; it may be a run itself.
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one.
        allowed_hosts: names by which the page is reached, besides `host` and those of loopback.

    Raises:
        RunError: there is no such folder.
        MissingExtraError: the web server is not installed.
        InputError: the port is taken, or the address is not one of this machine.

    Example:
        >>> import httpx, tempfile
        >>> with serve_page(tempfile.mkdtemp()) as page:
        ...     with_token = httpx.get(page.url(), follow_redirects=True).status_code
        ...     with_token, httpx.get(page.base_url).status_code
        (200, 401)
    """
    try:
        from steelyard.engine.server.http_server import (  # noqa: PLC0415 - an extra
            AllowedHosts,
            HttpServer,
            is_loopback,
            listen,
        )
        from steelyard.experiment.page.app import make_app  # noqa: PLC0415 - as above
        from steelyard.experiment.page.security import Tokens  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        raise cure("serve_page", error, extra="watch") from error
    index = RunIndex(folder)
    listener, base_url = listen(host, port)
    tokens, stopping = Tokens(), asyncio.Event()
    server = HttpServer(
        make_app(RunViews(index), tokens, AllowedHosts(host, allowed_hosts), stopping),
        listener,
        name="steelyard-watch",
        max_connections=_MAX_CONNECTIONS,
    )
    try:
        is_local = is_loopback(urlsplit(base_url).hostname or "")
        yield WatchPage(base_url, index.folder, tokens, is_local)
    finally:
        server.loop.call_soon_threadsafe(stopping.set)
        server.stop()
