"""Address of a Tinker service, and whether this machine may send the user's key there.

The key goes to the SDK's default address, to `$TINKER_BASE_URL`, and to an address that the user
has named: in a config that they train, or with `--base-url`. A run folder may come from somebody
else, so the address in its config counts only if it was named on this machine before. Which ones
were is kept among the user's own settings, not in the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import platformdirs
from pydantic import ValidationError

from steelyard.errors import ConfigError, RunError
from steelyard.experiment.config import Config, ModelConfig
from steelyard.experiment.config_errors import format_errors
from steelyard.experiment.run_dir import write_atomic

# What the SDK takes for a key; servers without keys accept it.
PLACEHOLDER = "tml-local"
# What the SDK sends, or runs at a server's request, beside the key.
_OTHER_SECRETS = (
    "TINKER_CREDENTIAL_CMD",
    "CLOUDFLARE_ACCESS_CLIENT_ID",
    "CLOUDFLARE_ACCESS_CLIENT_SECRET",
)


def named_addresses() -> list[str]:
    """Addresses that the user has named on this machine."""
    try:
        addresses = json.loads(_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    known = addresses if isinstance(addresses, list) else []
    return [address for address in known if isinstance(address, str)]


def remember_address(config: ModelConfig) -> None:
    """Remember that the user has named the address in a config.

    Where their settings cannot be written, a run folder asks for it again.
    """
    address, known = config.base_url, named_addresses()
    if config.backend != "tinker" or address is None or address in known:
        return
    with contextlib.suppress(RunError):
        write_atomic(_file(), json.dumps([*known, address], indent=2).encode())


def with_named_address(config: Config, base_url: str | None, folder: Path) -> Config:
    """Config of a run folder, whose service is one that the user has named.

    Args:
        config: the config in the folder.
        base_url: the address that the user names with the command; None: none.
        folder: run folder, for messages.

    Raises:
        RunError: the config has an address that the user has not named.
        ConfigError: `base_url` is no address.
    """
    if base_url is not None:
        raw = config.model_dump(mode="json")
        raw["model"]["base_url"] = base_url
        try:
            config = Config.model_validate(raw)
        except ValidationError as error:
            raise ConfigError(format_errors(error)) from None
        remember_address(config.model)
    elif config.model.backend == "tinker":
        address = config.model.base_url
        if address is not None and address not in named_addresses():
            raise RunError(
                f"{folder} was trained on the Tinker service at {address}, which you have not "
                f"named on this machine, and your API key would be sent there: if you trust it, "
                f"give --base-url {address} once."
            )
    return config


def service_options(config: ModelConfig) -> dict[str, Any]:
    """Arguments of the SDK's `ServiceClient`: the address, and the key where it must not be real.

    A real key is not sent over plain http, except to this machine: there it is the placeholder,
    which self-hosted servers without keys accept.

    Raises:
        RunError: other secrets in the environment would be sent over plain http.
    """
    options: dict[str, Any] = {} if config.base_url is None else {"base_url": config.base_url}
    address = urlsplit(address_of(config) or "https://")
    if address.scheme != "http" or _is_loopback(address.hostname or ""):
        return options
    secrets = [name for name in _OTHER_SECRETS if os.environ.get(name)]
    if secrets:
        raise RunError(
            f"the address of a Tinker service must begin with https:// where {secrets[0]} is set, "
            f"got {address.geturl()}: over plain http everybody on the way can read it. Unset it, "
            f"or use https."
        )
    return {**options, "api_key": PLACEHOLDER}


def address_of(config: ModelConfig) -> str | None:
    """Address of the service; None for the SDK's default."""
    return config.base_url or os.environ.get("TINKER_BASE_URL")


def _is_loopback(host: str) -> bool:
    from steelyard.engine.server.http_server import is_loopback  # noqa: PLC0415 - takes seconds

    return is_loopback(host)


def _file() -> Path:
    return platformdirs.user_config_path("steelyard") / "addresses.json"
