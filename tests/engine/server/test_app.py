from __future__ import annotations

from typing import Any

import httpx
import pytest
import tinker

from steelyard.engine.server.app import RunningServer

from .wire_client import Wire, error_of


def test_a_wrong_api_key_is_rejected(
    strict: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # the SDK would send it with a wrong key for ever
    with pytest.raises(tinker.AuthenticationError, match="the API key must be the one"):
        tinker.ServiceClient(
            base_url=strict.base_url, api_key="tml-wrong"
        ).create_lora_training_client("tiny-random")
    bare = httpx.get(f"{strict.base_url}/api/v1/healthz")
    assert bare.status_code == 401
    not_ascii = httpx.get(
        f"{strict.base_url}/api/v1/healthz", headers=[(b"X-API-Key", b"tml-secr\xe9t")]
    )
    assert not_ascii.status_code == 401
    right = httpx.get(f"{strict.base_url}/api/v1/healthz", headers={"X-API-Key": "tml-secret"})
    assert right.json() == {"status": "ok"}


def test_a_request_from_a_web_page_is_rejected(running: RunningServer) -> None:
    response = httpx.post(
        f"{running.base_url}/api/v1/create_session", headers={"Origin": "https://example.com"}
    )
    assert response.status_code == 403
    assert error_of(response) == "web pages are not allowed to use this server."


def test_an_unexpected_error_is_a_500_without_its_message(
    running: RunningServer,
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a secret path")

    with monkeypatch.context() as patched:
        patched.setattr(running._state.models, "capabilities", broken)
        response = wire.http.get("get_server_capabilities")
    assert response.status_code == 500
    assert response.json() == {"detail": "the server failed: RuntimeError"}
    assert response.headers["x-should-retry"] == "false"
    assert wire.http.get("get_server_capabilities").status_code == 200


def test_an_unknown_route_is_not_found(wire: Wire) -> None:
    assert wire.http.get("nowhere").status_code == 404
    assert wire.http.get("create_model").status_code == 405
