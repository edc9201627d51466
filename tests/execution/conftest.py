from __future__ import annotations

from collections.abc import Iterator

import pytest

from steelyard.execution.workers import Workers

from .every_executor import EXECUTORS


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(processes=2) as workers:
        yield workers


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "ray":
        request.getfixturevalue("ray_driver")
    return found
