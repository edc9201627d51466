"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    # Ray is imported by the tests that use it alone: `make test-gpu` runs on machines without it.
    from tests.ray_cluster import RayCluster  # noqa: PLC0415

    cluster = RayCluster()
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def ray_driver(ray_cluster: RayCluster) -> Iterator[RayCluster]:
    """The cluster, with this process connected to it."""
    with ray_cluster.connected():
        yield ray_cluster
