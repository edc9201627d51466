from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker.lib.internal_client_holder import InternalClientHolder

from steelyard.engine import LocalServiceClient
from steelyard.engine.server.lifecycle import RunningServer

from .wire_client import Wire, start

# A program of its own, not a module to look for examples in.
collect_ignore = ["cookbook.py"]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the server that most tests share."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="package")
def running(folder: Path) -> Iterator[RunningServer]:
    """One server for all tests that do not need their own."""
    with start(folder) as running:
        yield running
        # A client that outlives its server asks for it for ever, in a thread that draws from
        # `random`, which tests elsewhere notice.
        for holder in [each for each in gc.get_objects() if type(each) is InternalClientHolder]:
            holder.run_coroutine_threadsafe(holder.aclose()).result(timeout=600)


@pytest.fixture
def sdk(running: RunningServer) -> Iterator[tinker.ServiceClient]:
    """The SDK, unmodified, connected to the server."""
    with tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service:
        yield service


@pytest.fixture
def training(sdk: tinker.ServiceClient) -> tinker.TrainingClient:
    return sdk.create_lora_training_client("tiny-random", rank=4, seed=0)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServiceClient]:
    """The engine in this process, to compare with."""
    with LocalServiceClient(checkpoint_dir=tmp_path_factory.mktemp("local")) as service:
        yield service


@pytest.fixture
def wire(running: RunningServer) -> Iterator[Wire]:
    """Plain requests, for what the SDK would never send."""
    with Wire(running.base_url) as wire:
        yield wire
