"""Read config files (TOML, YAML, JSON), apply overrides, validate and resolve paths."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from steelyard.errors import ConfigError
from steelyard.experiment.config import Config
from steelyard.experiment.config_errors import format_errors


class _YamlLoader(yaml.SafeLoader):
    """Safe loader that reads 1e-4 as a number, as YAML 1.2 does; PyYAML wants 1.0e-4."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


def read_config(
    source: str | Path | Mapping[str, Any],
    overrides: Iterable[str] = (),
    *,
    folder: str | Path = ".",
) -> Config:
    """Read a config from a file or a mapping, and make its paths absolute.

    Args:
        source: a `.toml`, `.yaml`, `.yml` or `.json` file, or a mapping of the same keys.
        overrides: `key=value` with dotted keys, as `train.steps=5` or
            `regularizers.kl.weight=0.2`; the value is parsed as TOML, or else is a string.
        folder: base of relative paths in a mapping; paths in a file are relative to its folder.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown or invalid.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "train.jsonl").write_text("")
        >>> raw = {"data": {"path": "train.jsonl"}}
        >>> read_config(raw, ["train.steps=5"], folder=folder).train.steps
        5
    """
    if isinstance(source, Mapping):
        raw, folder = _copy(source), Path(folder)
    else:
        raw, folder = _parse(Path(source)), Path(source).parent
    for override in overrides:
        _apply_override(raw, override)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(format_errors(error)) from None
    return _resolve_paths(config, folder.expanduser().resolve())


def _parse(path: Path) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml", ".json"):
        raise ConfigError(
            f"a config must be a .toml, .yaml, .yml or .json file, got {str(path)!r}."
        )
    try:
        text = path.read_text("utf-8")
        if kind == ".toml":
            return tomllib.loads(text)
        raw = json.loads(text) if kind == ".json" else yaml.load(text, _YamlLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"a config must be a file that can be read, got {path}: {reason}."
        ) from error
    except (ValueError, yaml.YAMLError) as error:  # tomllib's and json's errors are ValueErrors
        raise ConfigError(f"{path} must be {kind[1:].upper()}, and it is not: {error}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a table of keys, got {type(raw).__name__}.")
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"an override must look like train.steps=5, got {override!r}.")
    node: Any = raw
    for key in keys[:-1]:
        node = _child(node, key, dotted)
    if not isinstance(node, dict):
        raise ConfigError(f"the override {dotted} must name a key of a table, and it does not.")
    node[keys[-1]] = _parse_value(text)


def _child(node: Any, key: str, dotted: str) -> Any:
    if isinstance(node, dict):
        return node.setdefault(key, {})
    if isinstance(node, list):
        entries = [entry for entry in node if isinstance(entry, dict)]
        names = [str(entry.get("name") or entry.get("use")) for entry in entries]
        if key in names:
            return entries[names.index(key)]
        raise ConfigError(f"the override {dotted} must name one of {names}, got {key!r}.")
    raise ConfigError(f"the override {dotted} must name a key of a table, and {key!r} is in none.")


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _resolve_paths(config: Config, folder: Path) -> Config:
    data = config.data
    files: dict[str, Any] = {"path": _existing_file("path", folder, data.path)}
    if isinstance(data.held_out, str):
        files["held_out"] = _existing_file("held_out", folder, data.held_out)
    python_path = [str((folder / entry).resolve()) for entry in config.python_path]
    return config.model_copy(
        update={
            "data": data.model_copy(update=files),
            "python_path": list(dict.fromkeys([*python_path, str(folder)])),
        }
    )


def _existing_file(key: str, folder: Path, given: str) -> str:
    path = (folder / Path(given).expanduser()).resolve()
    if not path.is_file():
        raise ConfigError(f"[data]: {key} must be a file that exists, got {str(path)!r}")
    return str(path)


def _copy(source: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(source))
    return copied
