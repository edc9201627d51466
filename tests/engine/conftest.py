from __future__ import annotations

from collections.abc import Iterator

import pytest

from steelyard.engine import LocalServiceClient, LocalTrainingClient


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServiceClient]:
    with LocalServiceClient(checkpoint_dir=tmp_path_factory.mktemp("checkpoints")) as service:
        yield service


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServiceClient]:
    """In float64, for comparisons that leave no room for luck."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with LocalServiceClient(checkpoint_dir=folder, dtype="float64") as service:
        yield service


@pytest.fixture
def client(service: LocalServiceClient) -> LocalTrainingClient:
    return service.create_lora_training_client("tiny-random", rank=4, seed=0)
