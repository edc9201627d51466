from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.experiment.trained_runs import train_on_chats

from .command import CommandRunner
from .project import write_project


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandRunner]:
    with CommandRunner(tmp_path_factory.mktemp("output")) as runner:
        yield runner


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a config, data and custom terms."""
    return write_project(tmp_path)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on chats, whose base model is in `base/` beside it."""
    return train_on_chats(tmp_path_factory.mktemp("trained"))
