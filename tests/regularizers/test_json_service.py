"""A service on loopback, asked by a reward; `test_external_validation.py` has the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from steelyard.errors import InputError, SpecError, TermError
from steelyard.regularizers.json_service import JsonService, ServiceOptions, as_json
from steelyard.spec.checks import OptionChecks
from tests.regularizers.http_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def service(url: str, field: str, **changed: Any) -> JsonService:
    options: dict[str, Any] = {
        "url": url,
        "headers": None,
        "concurrency": 2,
        "request_timeout": 600.0,
        "retries": 1,
        "backoff": 0.0,
        "max_backoff": 0.0,
        "max_bytes": 1000,
        "follow_redirects": False,
        **changed,
    }
    return JsonService("judge", OptionChecks("reward"), field, ServiceOptions(**options))


def test_the_number_is_that_of_the_field(server: Server) -> None:
    assert asyncio.run(service(server.url("check"), "penalty").post("{}")).content == 0.5
    with pytest.raises(TermError, match=r"^got an object without it$"):
        asyncio.run(service(server.url("check"), "reward").post("{}"))


def test_errors_name_the_owner(server: Server) -> None:
    with pytest.raises(SpecError, match=r"retries must be .*, got -1 \(reward 'judge'\)\.$"):
        service(server.url("check"), "reward", retries=-1)
    with pytest.raises(SpecError, match=r"url must be .* \(reward 'judge'\)\.$"):
        service("nowhere", "reward")


def test_a_request_must_be_json() -> None:
    assert as_json({"a": 1}, "payload", "datum 0") == '{"a": 1}'
    with pytest.raises(InputError) as caught:
        as_json({1, 2}, "payload", "datum 0")
    assert str(caught.value) == (
        "payload must give something JSON can hold for datum 0, got set: Object of type set is "
        "not JSON serializable."
    )
