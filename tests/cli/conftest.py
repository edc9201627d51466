from __future__ import annotations

import os
import pty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pexpect import fdpexpect

from tests.experiment.trained_runs import train_on_chats

from .command import CommandRunner, Spawn, Started
from .project import write_project


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    with CommandRunner(tmp_path_factory.mktemp("output")) as runner:
        yield runner


@pytest.fixture
def spawn(command: CommandRunner, tmp_path: Path) -> Iterator[Spawn]:
    """Start a command on a terminal of its own; the terminal's other end, and the process."""
    outer, inner = pty.openpty()

    def start(*args: str, columns: int = 100) -> tuple[Any, Started]:
        size = {"COLUMNS": str(columns), "LINES": "50"}
        env = {"TERM": "xterm-256color", "NO_COLOR": "1", **size}
        terminal = Path(os.ttyname(inner))
        started = command.start(*args, cwd=tmp_path, env=env, terminal=terminal)
        screen = fdpexpect.fdspawn(outer, timeout=600, encoding="utf-8", codec_errors="replace")
        return screen, started

    yield start
    os.close(inner)
    os.close(outer)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a config, data and custom terms."""
    return write_project(tmp_path)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on chats, whose base model is in `base/` beside it."""
    return train_on_chats(tmp_path_factory.mktemp("trained"))
