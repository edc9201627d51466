"""Access to the page: what gets in, and what does not."""

from __future__ import annotations

import hmac

import pytest
from starlette.testclient import TestClient

from steelyard.experiment.page.security import Tokens

from .conftest import Served

PATHS = ("/", "/static/app.js", "/api/runs", "/api/run?run=first", "/api/records/log?run=first")


@pytest.mark.parametrize("path", [*PATHS, "/api/events", "/nothing"])
def test_nothing_without_the_token(served: Served, path: str) -> None:
    response = served.stranger().get(path)
    assert response.status_code == 401
    assert response.text.startswith("This page needs its token")
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize("path", PATHS)
def test_everything_with_it(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


def test_the_token_becomes_a_cookie_and_leaves_the_address(served: Served) -> None:
    response = served.stranger().get("/", params={"token": served.tokens.token})
    assert (response.status_code, response.headers["location"]) == (303, "/")
    name, _, rest = response.headers["set-cookie"].partition("=")
    assert name == served.tokens.cookie
    attributes = {part.strip().lower() for part in rest.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= attributes
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("token", ["", "wrong", "ü", "\udcff", "x" * 10_000])
def test_a_wrong_token_sets_no_cookie(served: Served, token: str) -> None:
    response = served.stranger().get("/", params={"token": token.encode("utf-8", "replace")})
    assert response.status_code == 401
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize("cookie", ["{name}=wrong", "other={token}", "{name}", "=;=,", "{name}=ü"])
def test_a_wrong_cookie(served: Served, cookie: str) -> None:
    text = cookie.format(name=served.tokens.cookie, token=served.tokens.token)
    response = served.stranger().get("/api/runs", headers={b"cookie": text.encode()})
    assert response.status_code == 401


def test_the_token_opens_the_page_only(served: Served) -> None:
    response = served.stranger().get("/api/runs", params={"token": served.tokens.token})
    assert response.status_code == 401


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest

    def record(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr("steelyard.experiment.page.security.hmac.compare_digest", record)
    tokens = Tokens()
    assert tokens.accepts(tokens.token)
    assert not tokens.accepts_cookie(f"{tokens.cookie}=x")
    assert [b.decode() for _, b in compared] == [tokens.token, tokens.token]


def test_a_token_for_one_use_is_used_up() -> None:
    tokens = Tokens()
    once = tokens.for_one_use()
    assert [tokens.accepts(once), tokens.accepts(once)] == [True, False]
    assert tokens.accepts(tokens.token)
    assert tokens.accepts(tokens.token)


def test_servers_have_cookies_of_their_own() -> None:
    assert Tokens().cookie != Tokens().cookie


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9999", "127.0.0.1:1", "[::1]:7007", "gpu.example.org:80"]
)
def test_allowed_hosts(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "192.168.1.7", "127.0.0.1@evil.example", ""]
)
def test_other_hosts_are_refused_with_the_token_too(client: TestClient, host: str) -> None:
    response = client.get("/api/runs", headers={"host": host})
    assert response.status_code == 421
    assert "--allowed-host" in response.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "https://localhost:7007"])
def test_changes_must_come_from_this_page(
    client: TestClient, method: str, origin: str | None
) -> None:
    headers = {} if origin is None else {"origin": origin}
    assert client.request(method, "/api/runs", headers=headers).status_code == 403


def test_a_change_from_this_page_gets_as_far_as_the_routes(client: TestClient) -> None:
    headers = {"origin": "http://localhost:7007"}
    assert client.post("/api/runs", headers=headers).status_code == 405


def test_a_change_from_this_page_needs_the_cookie(served: Served) -> None:
    headers = {"origin": "http://localhost:7007"}
    assert (
        served.stranger().post("/?token=" + served.tokens.token, headers=headers).status_code == 401
    )


def test_other_pages_cannot_read(client: TestClient) -> None:
    headers = {"origin": "http://evil.example"}
    assert client.get("/api/runs", headers=headers).status_code == 403


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/nothing"])
def test_headers_of_every_response(client: TestClient, served: Served, path: str) -> None:
    for each in (client, served.stranger()):
        headers = each.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self'; ")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers
