"""Where the API key may go: never to an address that only a run folder names."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
import tinker

from steelyard.errors import ConfigError, RunError
from steelyard.experiment import open_trained_model, resume, train
from steelyard.experiment.config.schema import ModelConfig
from steelyard.experiment.model.backend import (
    PLACEHOLDER,
    named_addresses,
    remember_address,
    service_options,
    with_named_address,
)
from tests.engine.server.wire_client import start
from tests.experiment.small_runs import small_config, stop_after

KEY = "tml-a-real-key"


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's settings, empty, and their API key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    return tmp_path / "settings"


class Listener:
    """Keeps the keys that the SDK would send: those of its requests, by URL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, str | None]] = []
        handle = httpx.AsyncHTTPTransport.handle_async_request

        async def record(
            transport: httpx.AsyncHTTPTransport, request: httpx.Request
        ) -> httpx.Response:
            self.sent.append((str(request.url), request.headers.get("X-API-Key")))
            return await handle(transport, request)

        monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", record)


def remote(url: str | None) -> ModelConfig:
    return ModelConfig(backend="tinker", base_model="tiny-random", base_url=url)


def test_the_service_of_a_run_folder_gets_no_key_until_it_is_named(
    tmp_path: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path / "served") as running:
        address = running.base_url
        config = small_config(tmp_path, "model.backend=tinker", f"model.base_url={address}")
        train(config, tmp_path / "run", stop=stop_after(1))
        assert named_addresses() == [address]
        # The folder comes to somebody else, who has a key and has named no such address.
        shutil.rmtree(settings)
        listener = Listener(monkeypatch)
        message = rf"the Tinker service at {address}, which you have not named on this machine"
        with pytest.raises(RunError, match=rf"{message}.* give --base-url {address} once"):
            resume(tmp_path / "run")
        with pytest.raises(RunError, match=message):
            open_trained_model(tmp_path / "run")
        assert listener.sent == []
        with open_trained_model(tmp_path / "run", base_url=address) as model:
            assert model.sample([{"prompt": "a"}], model.params(max_tokens=1))
        assert {key for _, key in listener.sent} == {KEY}
        assert all(url.startswith(address) for url, _ in listener.sent)
        with open_trained_model(tmp_path / "run") as model:  # named, so remembered
            assert model.checkpoint.step == 1
    assert not list((tmp_path / "run").rglob("addresses.json"))


def test_an_address_is_remembered_once(settings: Path) -> None:
    for url in ("https://a.example", "https://b.example", "https://a.example", None):
        remember_address(remote(url))
    remember_address(ModelConfig(base_url="https://local.example"))
    assert named_addresses() == ["https://a.example", "https://b.example"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[" * 100_000, '["https://a.example"'])
def test_damaged_settings_name_nothing(settings: Path, content: str) -> None:
    remember_address(remote("https://a.example"))
    (file,) = settings.rglob("addresses.json")
    file.write_text(content)
    assert named_addresses() == []


def test_settings_that_cannot_be_written_name_nothing(settings: Path) -> None:
    settings.write_text("a file")
    remember_address(remote("https://a.example"))
    assert named_addresses() == []


def test_the_default_address_needs_no_name(tmp_path: Path) -> None:
    config = small_config(tmp_path, "model.backend=tinker")
    assert with_named_address(config, None, tmp_path) == config


def test_what_is_no_address_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"base_url must be an http:// or https:// address"):
        with_named_address(small_config(tmp_path), "ftp://a", tmp_path)


@pytest.mark.parametrize(
    ("url", "is_real"),
    [
        (None, True),
        ("https://far.example", True),
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://192.0.2.1:8000", False),
        ("http://far.example", False),
        ("http://localhost.far.example", False),
        ("HTTP://far.example", False),
    ],
)
def test_a_real_key_does_not_go_over_plain_http(
    monkeypatch: pytest.MonkeyPatch, url: str | None, is_real: bool
) -> None:
    """Whether the config names the address or the environment."""
    own = {} if is_real else {"api_key": PLACEHOLDER}
    if url is not None:
        assert service_options(remote(url.lower())) == {"base_url": url.lower(), **own}
        monkeypatch.setenv("TINKER_BASE_URL", url)
    assert service_options(remote(None)) == own


@pytest.mark.parametrize("name", ["TINKER_CREDENTIAL_CMD", "CLOUDFLARE_ACCESS_CLIENT_SECRET"])
def test_other_secrets_do_not_go_over_plain_http(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "secret")
    with pytest.raises(RunError, match=f"must begin with https:// where {name} is set, got http"):
        service_options(remote("http://far.example"))
    assert service_options(remote("https://far.example")) == {"base_url": "https://far.example"}


def test_the_placeholder_is_a_key_for_the_sdk(tmp_path: Path) -> None:
    with start(tmp_path) as running:
        service = tinker.ServiceClient(base_url=running.base_url, api_key=PLACEHOLDER)
        assert service.get_server_capabilities().supported_models
        service.close("success").result()
