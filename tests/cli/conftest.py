from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
