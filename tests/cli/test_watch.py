"""The command `steelyard watch`, and `steelyard train --watch`, run for real."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from steelyard.cli.page import _has_browser

from .command import CommandRunner, Started, wait_for

# No display: no browser is opened on the machine that runs the tests.
NO_DISPLAY = {"DISPLAY": "", "WAYLAND_DISPLAY": "", "SSH_CONNECTION": "1"}


def url_of(started: Started) -> str:
    """Wait until the page is served; its URL."""
    while True:
        output = started.out.read_text() if started.out.exists() else ""
        if found := re.search(r"^  (http://\S+)\n", output, re.MULTILINE):
            return found[1]
        time.sleep(0.01)


@contextlib.contextmanager
def started(command: CommandRunner, *args: str, cwd: Path) -> Iterator[Started]:
    running = command.start(*args, cwd=cwd, env=NO_DISPLAY)
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_serves_the_page_and_stops(
    command: CommandRunner, tmp_path: Path, number: int
) -> None:
    (tmp_path / "runs").mkdir()
    with started(command, "watch", "--port", "0", cwd=tmp_path) as running:
        url = url_of(running)
        with httpx.Client(follow_redirects=True) as client:
            assert "<title>Steelyard</title>" in client.get(url).text
            assert client.get(httpx.URL(url).join("/api/runs")).json()["runs"] == []
        wait_for(running.out, lines=4)
        running.kill(number)
        done = running.wait()
    port = httpx.URL(url).port
    assert done.code == 0, done.err
    assert done.out == (
        f"Watching {tmp_path.resolve()}/runs at\n  {url}\n"
        f"No browser to open it in. From another machine: "
        f"ssh -L {port}:localhost:{port} {socket.gethostname()}\n"
        f"Ctrl-C stops it.\nStopped.\n"
    )
    assert done.err == ""


def test_no_such_folder(command: CommandRunner, tmp_path: Path) -> None:
    done = command.run("watch", cwd=tmp_path)
    assert done.code == 1
    assert done.err.startswith("RunError: runs must be a folder of runs, and it is none: give ")
    assert done.err.count("\n") == 1


def test_a_port_in_use(command: CommandRunner, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = command.run("watch", ".", "--port", str(port), cwd=tmp_path)
    assert done.code == 1
    assert f"127.0.0.1:{port} is not" in done.err
    assert done.err.count("\n") == 1


def test_other_machines_are_a_warning(command: CommandRunner, tmp_path: Path) -> None:
    args = ("watch", ".", "--host", "0.0.0.0", "--port", "0", "--no-browser")
    with started(command, *args, cwd=tmp_path) as running:
        url_of(running)
        wait_for(running.out, lines=3)
        running.kill(signal.SIGINT)
        done = running.wait()
    assert "not encrypted" in done.err
    assert "No browser" not in done.out


@pytest.mark.parametrize("own_folder", [False, True])
def test_train_serves_the_page_of_its_run(
    command: CommandRunner, project: Path, own_folder: bool
) -> None:
    folder = ("--run", "mine") if own_folder else ()
    args = ("train", "c.toml", "train.steps=400", "--watch", *folder)
    with started(command, *args, cwd=project) as running:
        url = httpx.URL(url_of(running))
        run = url.fragment.removeprefix("run=")
        with httpx.Client(follow_redirects=True) as client:
            assert client.get(url).status_code == 200
            while not (found := client.get(url.join("/api/runs")).json()["runs"]):
                time.sleep(0.01)
        assert [(each["name"], each["state"]) for each in found] == [(run, "running")]
        assert run == "." if own_folder else run.startswith("c-")
        running.kill(signal.SIGINT)
        assert running.wait().code == 130


def test_a_baseline_serves_the_page_of_both_runs(command: CommandRunner, project: Path) -> None:
    args = ("train", "c.toml", "train.steps=400", "--baseline", "--watch", "--run", "b")
    with started(command, *args, cwd=project) as running:
        url = httpx.URL(url_of(running))
        assert url.fragment == "", "the list of the runs"
        with httpx.Client(follow_redirects=True) as client:
            assert client.get(url).status_code == 200
            while not (found := client.get(url.join("/api/runs")).json()["runs"]):
                time.sleep(0.01)
        assert [(each["name"], each["state"]) for each in found] == [("all", "running")]
        running.kill(signal.SIGINT)
        assert running.wait().code == 130


def test_a_run_that_cannot_begin_leaves_no_folder(command: CommandRunner, project: Path) -> None:
    args = ("train", "c.toml", "model.base_model=no-such", "--watch", "--run", "mine")
    done = command.run(*args, cwd=project, env=NO_DISPLAY)
    assert done.code == 2
    assert "got 'no-such'" in done.err
    assert not (project / "mine").exists()


def test_a_browser_must_have_a_window_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    browser = webbrowser.GenericBrowser("firefox")
    monkeypatch.setattr(webbrowser, "get", lambda: browser)
    assert _has_browser()
    browser.name = "/usr/bin/lynx"
    assert not _has_browser(), "it would take over the terminal"
    browser.name = "firefox"
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 22")
    assert not _has_browser(), "its window would open on the other machine"
    monkeypatch.delenv("SSH_CONNECTION")
    if sys.platform == "linux":
        monkeypatch.delenv("DISPLAY")
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        assert not _has_browser()
