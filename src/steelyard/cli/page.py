"""The commands `steelyard report` and `steelyard watch`, and the page of `train --watch`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from steelyard.experiment.page.server import WatchPage

Watch = Annotated[
    bool, typer.Option("--watch", help="Open a page with live charts of the run in the browser.")
]

_POLL_SECONDS = 0.1
_TEXT_BROWSERS = ("elinks", "links", "lynx", "w3m", "www-browser")


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Folder of the runs, or one run.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 7007,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name by which the page is reached; may be repeated."),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")
    ] = True,
) -> None:
    """Show the runs in a folder live, on a page in the browser."""
    from steelyard.cli.exit_codes import Interruption  # noqa: PLC0415 - takes seconds
    from steelyard.experiment.page.server import serve_page  # noqa: PLC0415 - as above

    with (
        Interruption(lambda: None, lambda: None) as interruption,
        serve_page(folder, host=host, port=port, allowed_hosts=allowed_host or ()) as page,
    ):
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        typer.echo(f"Watching {page.folder} at")
        typer.echo(f"  {page.url()}")
        if not page.is_local:
            typer.echo(
                "Other machines can reach this page, and what they exchange with it is not "
                "encrypted. Safer: ssh -L to a page on 127.0.0.1.",
                err=True,
            )
        if browser:
            _open(page)
        typer.echo("Ctrl-C stops it.")
        while not interruption.requested():
            time.sleep(_POLL_SECONDS)
    typer.echo("Stopped.")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter would take seconds to take torch apart


@contextlib.contextmanager
def page_of_run(run: Path | None, folder: Path) -> Iterator[None]:
    """Serve and open the page of a run for the duration of a `with` block.

    Args:
        run: the run folder, which need not exist yet; None: the page with the list of all runs.
        folder: the folder of the list: that of several runs, or the run folder itself.
    """
    from steelyard.experiment.page.server import serve_page  # noqa: PLC0415 - takes seconds

    with contextlib.suppress(OSError):  # then there is no such folder, says the next line
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with serve_page(folder) as page:
            name = None if run is None else run.resolve().relative_to(page.folder).as_posix()
            what = "the runs" if run is None else "this run"
            typer.echo(f"Watch {what} at\n  {page.url(name)}")
            _open(page, name)
            yield
    finally:
        with contextlib.suppress(OSError):  # a run that did not begin leaves no folder in the way
            folder.rmdir()


def _open(page: WatchPage, run: str | None = None) -> None:
    opened = _has_browser() and webbrowser.open(page.url(run, once=True))
    if not opened:
        typer.echo(f"No browser to open it in. From another machine: {page.tunnel}")


def _has_browser() -> bool:
    """Return whether a browser can open a window; one in the terminal would take that over."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    if sys.platform == "linux" and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return False
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    return Path(getattr(browser, "name", "")).name not in _TEXT_BROWSERS


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders, or the folder of an ablation or a search."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write; default: report.html in the run folder, or here for several.",
        ),
    ] = None,
) -> None:
    """Write an HTML report about runs, an ablation or a search."""
    from steelyard.experiment.page.frozen import write_report  # noqa: PLC0415 - takes seconds

    folder = runs[0] if len(runs) == 1 else Path()
    target = output or folder / "report.html"
    if target.is_dir():
        raise typer.BadParameter(f"--output must be a file, got the folder {target}.")
    typer.echo(f"Report: {write_report(runs, target)}")
