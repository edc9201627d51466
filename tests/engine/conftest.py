from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.engine import LocalSamplingClient, LocalServiceClient, LocalTrainingClient

from .data import create, train


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServiceClient]:
    """A service with the default dtype, shared by the tests of a module."""
    with LocalServiceClient(checkpoint_dir=tmp_path_factory.mktemp("checkpoints")) as service:
        yield service


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServiceClient]:
    """A service in float64, for comparisons with tight tolerances."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with LocalServiceClient(checkpoint_dir=folder, dtype="float64") as service:
        yield service


@pytest.fixture(scope="module")
def in_parts() -> Iterator[LocalServiceClient]:
    """A service in float64 with a budget of ten tokens: below the longest datum of `LENGTHS`."""
    with LocalServiceClient(dtype="float64", max_tokens=10) as service:
        yield service


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[LocalServiceClient]:
    """A service for one test, whose model has no adapters of other tests."""
    with LocalServiceClient(checkpoint_dir=tmp_path) as service:
        yield service


@pytest.fixture
def client(service: LocalServiceClient) -> LocalTrainingClient:
    client: LocalTrainingClient = create(service)
    return client


@pytest.fixture
def trained(client: LocalTrainingClient) -> LocalTrainingClient:
    """A client after two steps."""
    train(client, 2)
    return client


@pytest.fixture
def precise(exact: LocalServiceClient) -> LocalTrainingClient:
    """A client in float64 after one step."""
    client: LocalTrainingClient = create(exact)
    train(client)
    return client


@pytest.fixture(scope="module")
def sampled_training(exact: LocalServiceClient) -> LocalTrainingClient:
    """The training client whose weights `sampling` has."""
    client: LocalTrainingClient = create(exact)
    train(client, 3)
    return client


@pytest.fixture(scope="module")
def sampling(sampled_training: LocalTrainingClient) -> LocalSamplingClient:
    return sampled_training.save_weights_and_get_sampling_client()
