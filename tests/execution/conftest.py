from __future__ import annotations

from collections.abc import Iterator

import pytest

from steelyard.execution import Workers

from .lanes import LANES


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(processes=2) as workers:
        yield workers


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if found == "ray":
        request.getfixturevalue("ray_driver")
    return found
