"""Random bodies on every route: no 5xx, no crash, and the model is unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from steelyard.engine.server.app import ROUTES

from .fuzz import Target, bodies, paths
from .wire_client import Wire, start


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzzed")
    with (
        start(folder, poll_seconds=0.01, max_models=10**6, max_sessions=10**6) as running,
        Wire(running.base_url) as wire,
    ):
        yield Target(running, wire)


@pytest.mark.parametrize(("method", "path"), [route[:2] for route in ROUTES], ids=str)
def test_random_bodies_cause_no_server_error(target: Target, method: str, path: str) -> None:
    @settings(
        max_examples=60,  # `make stress` sends ten thousand in all
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(where=paths(target, path), body=bodies(target, path))
    def fuzz(where: str, body: tuple[bytes, dict[str, str]]) -> None:
        content, headers = body
        response = target.http.request(method, where, content=content, headers=headers)
        assert response.status_code < 500, response.text

    fuzz()
    target.check()
