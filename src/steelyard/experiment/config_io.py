"""Read config files (TOML, YAML, JSON), apply overrides, validate and resolve paths."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from steelyard.errors import ConfigError
from steelyard.experiment.config import Config, ModelConfig
from steelyard.experiment.config_errors import format_errors
from steelyard.experiment.config_secrets import (
    check_whole,
    dotted,
    redacted_keys,
    resolve_files,
    secret_keys,
)


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
    skip_bad: bool = False,
) -> Config:
    """Read a config from a file or a mapping, and make its paths absolute.

    Args:
        source: a `.toml`, `.yaml`, `.yml` or `.json` file, or a mapping of the same keys.
        overrides: `key=value` with dotted keys, as `train.steps=5` or
            `regularizers.kl.weight=0.2`; the value is parsed as TOML, or else is a string.
        folder: base of relative paths in a mapping; paths in a file are relative to its folder.
        skip_bad: skip malformed lines of the data, whatever the config says.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or invalid, or a secret was
            redacted when the file was written.

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
    config = _validate(raw)
    check_whole(raw)
    if skip_bad:
        changed = config.source.model_copy(update={"skip_bad": True})
        config = config.model_copy(update={config.source_key: changed})
    return _resolve_paths(config, folder.expanduser().resolve())


def restore_secrets(config: Config, overrides: Iterable[str] | Mapping[str, Any]) -> Config:
    """Copy the config of a run with its secrets, which are not written to the run folder.

    Args:
        config: config as read from the run folder.
        overrides: `key=value` for keys that hold a secret; or the secrets of the whole config by
            key, of which those that were redacted are taken.

    Raises:
        ConfigError: a secret is missing, or an override is not of a secret.
    """
    raw = config.model_dump(mode="json")
    if isinstance(overrides, Mapping):
        for key in redacted_keys(raw):
            if key in overrides:
                _set(raw, key, overrides[key])
    else:
        known = secret_keys(raw)
        for override in overrides:
            key = _apply_override(raw, override)
            if key not in known:
                listed = ", ".join(known) or "none"
                raise ConfigError(
                    f"a run is resumed with the settings it began with, and an override must give "
                    f"a secret again (here: {listed}), got {key}."
                )
    check_whole(raw)
    return config if raw == config.model_dump(mode="json") else _validate(raw)


def _validate(raw: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(format_errors(error)) from None


def _parse(path: Path) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml", ".json"):
        raise ConfigError(
            f"a config must be a .toml, .yaml, .yml or .json file, got {str(path)!r}."
        )
    try:
        text = path.read_text("utf-8-sig")  # a byte order mark is allowed
        if kind == ".toml":
            return tomllib.loads(text)
        raw = json.loads(text) if kind == ".json" else yaml.load(text, _YamlLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        failure = error.strerror or error
        raise ConfigError(
            f"a config must be a file that can be read, got {path}: {failure}."
        ) from error
    except RecursionError:
        raise ConfigError(f"{path} must be {kind[1:].upper()} that is less nested.") from None
    except (ValueError, yaml.YAMLError) as error:  # tomllib's and json's errors are ValueErrors
        reason = _yaml_reason(error) if isinstance(error, yaml.MarkedYAMLError) else error
        raise ConfigError(f"{path} must be {kind[1:].upper()}, and it is not: {reason}.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a table of keys, got {type(raw).__name__}.")
    return raw


def _yaml_reason(error: yaml.MarkedYAMLError) -> str:
    # Its own text quotes the line, which may hold a secret.
    mark = error.problem_mark or error.context_mark
    where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
    return f"{error.problem or error.context}{where}"


def _apply_override(raw: dict[str, Any], override: str) -> str:
    key, equals, text = override.partition("=")
    keys = _split(key)
    if not equals or not keys or not all(keys):  # the value is not shown: it may be a secret
        shown = f"{key}=…" if equals else key
        raise ConfigError(f"an override must look like train.steps=5, got {shown!r}.")
    _set(raw, key, parse_value(text))
    return dotted(keys)


def _set(raw: dict[str, Any], name: str, value: Any) -> None:
    keys = _split(name)
    node: Any = raw
    for key in keys[:-1]:
        node = _child(node, key, name)
    if not isinstance(node, dict):
        raise ConfigError(f"the override {name} must name a key of a table, and it does not.")
    node[keys[-1]] = value


def _split(name: str) -> list[str]:
    """Split a key at its dots; a part in double quotes may hold dots. Empty if it is no key."""
    try:
        return [part.strip() for part in next(csv.reader([name], delimiter="."), [])]
    except csv.Error:  # a line break
        return []


def _child(node: Any, key: str, name: str) -> Any:
    if isinstance(node, dict):
        return node.setdefault(key, {})
    if isinstance(node, list):
        entries = [entry for entry in node if isinstance(entry, dict)]
        names = [str(entry.get("name") or entry.get("use")) for entry in entries]
        if key in names:
            return entries[names.index(key)]
        raise ConfigError(f"the override {name} must name one of {names}, got {key!r}.")
    raise ConfigError(f"the override {name} must name a key of a table, and {key!r} is in none.")


def parse_value(text: str) -> Any:
    """Parse the value of an override: TOML, or JSON, or else a string."""
    text = text.strip()
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text) if text[:1] in ("[", "{", '"') else text
    except ValueError:
        return text


def _resolve_paths(config: Config, folder: Path) -> Config:
    source, key = config.source, config.source_key
    main = "path" if key == "data" else "prompts"
    files: dict[str, Any] = {main: _existing_file(key, main, folder, getattr(source, main))}
    if isinstance(source.held_out, str):
        files["held_out"] = _existing_file(key, "held_out", folder, source.held_out)
    loss = config.loss.model_copy(update={"options": resolve_files(config.loss.options, folder)})
    entries = {
        table: [
            entry.model_copy(update={"options": resolve_files(entry.options, folder)})
            for entry in getattr(config, table)
        ]
        for table in ("regularizers", "rewards", "evaluations")
    }
    python_path = [str((folder / entry).resolve()) for entry in config.python_path]
    return config.model_copy(
        update={
            "model": _resolve_model(config.model, folder),
            key: source.model_copy(update=files),
            "loss": loss,
            **entries,
            "python_path": list(dict.fromkeys([*python_path, str(folder)])),
        }
    )


def _resolve_model(model: ModelConfig, folder: Path) -> ModelConfig:
    """Make a base model that is a folder an absolute path, so that a run resumes from anywhere."""
    given = Path(model.base_model).expanduser()
    found = [path for path in (folder / given, Path.cwd() / given) if path.is_dir()]
    if model.backend != "local" or not found:
        return model
    from steelyard.engine import KNOWN_MODELS  # noqa: PLC0415 - takes seconds

    if model.base_model in KNOWN_MODELS:
        return model
    return model.model_copy(update={"base_model": str(found[0].resolve())})


def _existing_file(table: str, key: str, folder: Path, given: str) -> str:
    path = (folder / Path(given).expanduser()).resolve()
    if not path.is_file():
        raise ConfigError(f"[{table}]: {key} must be a file that exists, got {str(path)!r}")
    return str(path)


def _copy(source: Mapping[str, Any]) -> dict[str, Any]:
    try:
        copied: dict[str, Any] = json.loads(json.dumps(source, default=_as_json))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a config must be a mapping that JSON can hold: {error}.") from error
    return copied


def _as_json(value: object) -> str | dict[Any, Any]:
    """Path or mapping of another class, in a config that is written in Python."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it cannot hold a {type(value).__name__}")
