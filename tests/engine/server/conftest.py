from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker.lib.internal_client_holder import InternalClientHolder

from steelyard.engine import LocalServiceClient
from steelyard.engine.server.app import RunningServer
from tests.engine.data import SMALL, ragged

from .training_requests import STEPS
from .wire_client import Wire, start

# A script, not a module to collect doctests from.
collect_ignore = ["cookbook.py"]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder of the shared server."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="package")
def running(folder: Path) -> Iterator[RunningServer]:
    """Server that all tests share which do not need their own."""
    with start(folder) as running:
        yield running
        # A client that outlives its server retries for ever, in a thread that draws from
        # `random`, which tests elsewhere notice.
        for holder in [each for each in gc.get_objects() if type(each) is InternalClientHolder]:
            holder.run_coroutine_threadsafe(holder.aclose()).result(timeout=600)


@pytest.fixture
def sdk(running: RunningServer) -> Iterator[tinker.ServiceClient]:
    """The unmodified SDK, connected to the shared server."""
    with tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service:
        yield service


@pytest.fixture
def training(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    return sdk.create_lora_training_client("tiny-random", rank=4, seed=0)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServiceClient]:
    """The engine in this process, for expected results."""
    with LocalServiceClient(checkpoint_dir=tmp_path_factory.mktemp("local")) as service:
        yield service


@pytest.fixture
def wire(running: RunningServer) -> Iterator[Wire]:
    """Plain HTTP client, for requests that the SDK would never send."""
    with Wire(running.base_url) as wire:
        yield wire


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Server with small limits and an API key."""
    with start(
        tmp_path_factory.mktemp("strict"),
        api_key="tml-secret",
        max_body=4000,
        max_tokens=50,
        max_models=2,
        max_sessions=3,
        max_samplers=2,
        max_losses=1,
        max_nodes=6,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Server with short timeouts for results and missing requests."""
    folder = tmp_path_factory.mktemp("impatient")
    with start(folder, gap_seconds=0.2, keep_seconds=0.2, poll_seconds=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def reference(local: LocalServiceClient) -> list[float]:
    """Losses of the batches of `training_requests`, by the local client."""
    client = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    losses = []
    for step in range(STEPS):
        output = client.forward_backward(ragged(step, [4, 3]), "cross_entropy").result()
        client.optim_step(SMALL).result()
        losses.append(output.metrics["loss:sum"])
    return losses
