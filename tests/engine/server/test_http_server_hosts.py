from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
import tinker

from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.http_server import AllowedHosts, check_host, is_loopback, parse_host
from steelyard.errors import InputError

from .wire_client import error_of, start

OWN = ["localhost", "localhost:8000", "LocalHost", "localhost.", "127.0.0.1:1", "127.9.9.9"]
FOREIGN = [
    "evil.com",
    "evil.com:8000",
    "127.0.0.1.evil.com",
    "localhost.evil.com",
    "",
    "a@b",
    "x y",
]


def status(running: RunningServer, host: str) -> int:
    response = httpx.get(f"{running.base_url}/api/v1/healthz", headers={"Host": host})
    if response.status_code != 200:
        assert error_of(response).startswith(f"Host must be a name of this server, got {host!r}: ")
        assert "allowed_hosts (--allowed-host)" in error_of(response)
    return response.status_code


def test_a_request_for_another_host_is_rejected(running: RunningServer) -> None:
    """DNS rebinding: the name of a page's own site resolves to 127.0.0.1."""
    assert {host: status(running, host) for host in OWN} == dict.fromkeys(OWN, 200)
    others = [*FOREIGN, "0.0.0.0", "192.0.2.1", "[2001:db8::1]"]
    assert {host: status(running, host) for host in others} == dict.fromkeys(others, 421)


def test_a_request_that_changes_something_is_rejected_too(running: RunningServer) -> None:
    sessions = len(list(running._state.sessions))
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
    url = f"{running.base_url}/api/v1/create_session"
    assert httpx.post(url, json=body, headers={"Host": "evil.com:80"}).status_code == 421
    assert len(list(running._state.sessions)) == sessions


def test_more_names_can_be_allowed(tmp_path: Path) -> None:
    with start(tmp_path, allowed_hosts=["GPU.example.org", "box"]) as running:
        assert [status(running, h) for h in ("gpu.example.org:443", "box", "evil.com")] == [
            200, 200, 421,
        ]  # fmt: skip


def test_the_sdk_reaches_a_server_by_an_ipv6_address(tmp_path: Path) -> None:
    running = RunningServer(["tiny-random"], "::1", 0, {"checkpoint_dir": tmp_path}, {})
    try:
        with tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service:
            assert service.get_server_capabilities().supported_models
        assert [status(running, h) for h in ("[::1]", "[::1]:5", "[::2]", "evil.com")] == [
            200, 200, 421, 421,
        ]  # fmt: skip
    finally:
        running.stop()


def test_a_server_for_other_machines_is_reached_by_any_address_and_its_name(
    tmp_path: Path,
) -> None:
    settings = {"api_key": "tml-key"}
    running = RunningServer(["tiny-random"], "0.0.0.0", 0, {"checkpoint_dir": tmp_path}, settings)
    try:
        port = running.base_url.rpartition(":")[2]
        assert running.base_url == f"http://0.0.0.0:{port}"
        with tinker.ServiceClient(
            base_url=f"http://127.0.0.1:{port}", api_key="tml-key"
        ) as service:
            assert service.get_server_capabilities().supported_models
    finally:
        running.stop()
    hosts = AllowedHosts("0.0.0.0")
    own = ["0.0.0.0", "192.0.2.1:8000", "[2001:db8::1]:8000", socket.gethostname(), *OWN]
    assert [host for host in own if host not in hosts] == []
    assert [host for host in FOREIGN if host in hosts] == []


def test_a_star_allows_all_hosts() -> None:
    assert "evil.com" in AllowedHosts("127.0.0.1", ["*"])


@pytest.mark.parametrize(
    ("header", "host"),
    [
        ("Example.ORG:80", "example.org"),
        ("example.org.", "example.org"),
        ("[::1]:80", "::1"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("::1", None),
        ("a:b", None),
        ("a:123456", None),
        ("http://a", None),
        ("a,b", None),
        ("[evil.com]", None),
        ("a..b", None),
    ],
)
def test_the_host_of_a_header_is_found(header: str, host: str | None) -> None:
    assert parse_host(header) == host


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "::ffff:127.0.0.1", "localhost"]
)
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    check_host(host, None)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com", ""]
)
def test_other_hosts_need_a_key(host: str) -> None:
    assert not is_loopback(host)
    check_host(host, "tml-key")
    with pytest.raises(InputError):
        check_host(host, None)
