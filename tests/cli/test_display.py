"""Choice of the display, Ctrl-C while a command runs, and the default run folder."""

from __future__ import annotations

import os
import pty
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard.cli.display import LiveDisplay, TextDisplay, default_run_folder, run_with_display
from steelyard.experiment import Watcher


def test_output_to_a_file_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def run(watch: Watcher, stop: Callable[[], bool]) -> type:
        watch.say("loading")
        assert not stop()
        return type(watch)

    assert run_with_display(run) is TextDisplay
    assert capsys.readouterr().out == "loading\n"


def test_ctrl_c_sets_stop_and_prints_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    def run(_: Watcher, stop: Callable[[], bool]) -> tuple[bool, bool]:
        first = stop()
        signal.raise_signal(signal.SIGINT)
        return first, stop()

    assert run_with_display(run) == (False, True)
    assert capsys.readouterr().out == (
        "Finishing this step, then saving. Ctrl-C again ends at once.\n"
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_gets_the_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    main, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stdout, os.fdopen(main, "rb"):
        monkeypatch.setattr("sys.stdout", stdout)
        kind = run_with_display(lambda watch, _: type(watch))
        monkeypatch.undo()
    assert kind is LiveDisplay


def test_the_default_folder_has_the_name_of_the_config_and_the_time() -> None:
    folder = default_run_folder(Path("configs/first.toml"))
    assert folder.parent == Path("runs")
    assert re.fullmatch(r"first-\d{8}-\d{6}", folder.name)
