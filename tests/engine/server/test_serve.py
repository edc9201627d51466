from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from steelyard.engine import serve
from steelyard.errors import InputError


def test_the_server_stops_at_the_end_of_the_block(tmp_path: Path) -> None:
    with serve("tiny-random", checkpoint_dir=tmp_path) as base_url:
        assert base_url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{base_url}/api/v1/healthz").json() == {"status": "ok"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{base_url}/api/v1/healthz")


def test_an_error_in_the_block_stops_the_server(tmp_path: Path) -> None:
    urls = []

    def fail() -> None:
        with serve("tiny-random", checkpoint_dir=tmp_path) as base_url:
            urls.append(base_url)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls[0]}/api/v1/healthz")


def test_the_server_listens_on_ipv6_loopback(tmp_path: Path) -> None:
    with serve("tiny-random", host="::1", checkpoint_dir=tmp_path) as base_url:
        assert base_url.startswith("http://[::1]:")
        assert httpx.get(f"{base_url}/api/v1/healthz").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"port": -1}, "host and port must be free"),
        ({"host": "0.0.0.0"}, "host must be a loopback address"),
        ({"api_key": "secret"}, "api_key must start with 'tml-'"),
        ({"client_timeout": 0}, "client_timeout must be a finite number > 0, got 0"),
        ({"poll_seconds": float("nan")}, "poll_seconds must be a finite number > 0, got nan"),
        ({"max_models": 0}, "max_models must be a whole number >= 1, got 0"),
        ({"max_body": 1.5}, "max_body must be a whole number >= 1, got 1.5"),
        ({"max_modles": 3}, "the settings of a server are .* got \\['max_modles'\\]"),
        ({"base_model": []}, "base_model must name at least one model, got none"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_invalid_settings_are_rejected(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why), serve(**{"base_model": "tiny-random", **arguments}):
        pytest.fail("it serves")
