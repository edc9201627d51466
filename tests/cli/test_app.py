"""The command as a whole: version, help, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard import __version__
from steelyard.cli.app import main

from .command import CommandRunner

STEELYARD = Path(sys.executable).with_name("steelyard")


@pytest.mark.parametrize("command", [[STEELYARD], [sys.executable, "-m", "steelyard"]])
def test_the_version(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"steelyard {__version__}\n")


def test_help_lists_every_command(command: CommandRunner, tmp_path: Path) -> None:
    done = command.run("--help", cwd=tmp_path)
    assert done.code == 0
    listed = done.out.partition("Commands:\n")[2].splitlines()
    names = [line.split()[0] for line in listed]
    assert names == [
        "train", "resume", "branch", "set", "pause", "continue", "ablate", "tune", "report",
        "doctor", "chat", "sample", "export", "watch", "demo", "serve", "config", "models",
    ]  # fmt: skip
    assert not [line for line in listed if line.endswith("...")], "no help text is cut"


def test_ctrl_c_outside_of_a_run_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("sys.argv", ["steelyard", "--version"])
    try:
        with pytest.raises(SystemExit) as done:
            main()
        assert done.value.code == 0
        with pytest.raises(SystemExit) as interrupted:
            signal.raise_signal(signal.SIGINT)
        assert interrupted.value.code == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == f"steelyard {__version__}\n"
