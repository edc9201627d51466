from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import tinker
from tinker.lib.internal_client_holder import InternalClientHolder

from steelyard.engine.server.app import RunningServer
from tests.engine.server.wire_client import start


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Server of tiny-random that all tests share."""
    with start(tmp_path_factory.mktemp("served")) as running:
        yield running
        # A client that outlives its server retries for ever.
        for holder in [each for each in gc.get_objects() if type(each) is InternalClientHolder]:
            holder.run_coroutine_threadsafe(holder.aclose()).result(timeout=600)


@pytest.fixture
def service(running: RunningServer) -> Iterator[tinker.ServiceClient]:
    """The unmodified SDK, connected to the server."""
    with tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service:
        yield service


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny-random", rank=4, seed=0)


@pytest.fixture
def other(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """A second client with the same weights."""
    return service.create_lora_training_client("tiny-random", rank=4, seed=0)
