from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .command import Kitchen
from .project import write_project


@pytest.fixture(scope="session")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kitchen]:
    with Kitchen(tmp_path_factory.mktemp("output")) as made:
        yield made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a config, data and terms of one's own."""
    return write_project(tmp_path)
