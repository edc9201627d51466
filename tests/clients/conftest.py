from __future__ import annotations

from collections.abc import Iterator

import pytest

from steelyard.engine import LocalTrainingClient
from tests.clients.sdk import Answered, Holder, engine


@pytest.fixture
def local() -> LocalTrainingClient:
    return engine()


@pytest.fixture
def remote(local: LocalTrainingClient) -> Iterator[Answered]:
    holder = Holder()
    yield Answered(local, holder)
    holder.close()


@pytest.fixture(params=["local", "remote"])
def either(request: pytest.FixtureRequest) -> LocalTrainingClient | Answered:
    """The engine's client, then the SDK's."""
    client: LocalTrainingClient | Answered = request.getfixturevalue(request.param)
    return client
