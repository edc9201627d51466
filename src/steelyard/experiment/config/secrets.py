"""Secrets of a config: references to the environment and to files, and what redaction removed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from steelyard.errors import ConfigError
from steelyard.output import redaction

# Annotated as in a JSON schema; `additionalProperties` describes the values of `options`.
REFERENCE = {
    "title": "Secret",
    "description": "a secret from an environment variable, or from a file",
    "oneOf": [
        {
            "type": "object",
            "properties": {kind: {"type": "string", "minLength": 1}},
            "required": [kind],
            "additionalProperties": False,
        }
        for kind in ("env", "file")
    ],
}
_FORMS = '{ env = "NAME" } or { file = "PATH" }'


def check_references(options: dict[str, Any]) -> dict[str, Any]:
    """Check that no reference in the options is empty, and return them.

    Raises:
        ValueError: one is; the message is the rule.
    """
    for path, leaf, _ in redaction.leaves(options):
        if redaction.is_reference(leaf) and not all(leaf.values()):
            raise ValueError(f"must take {dotted(path)} from {_FORMS} with a name or a path")
    return options


def resolve_files(options: Mapping[str, Any], folder: Path) -> Any:
    """Copy options with the paths of `{ file = "PATH" }` made absolute."""

    def absolute(_: redaction.KeyPath, leaf: Any, __: bool) -> Any:
        if redaction.is_reference(leaf) and "file" in leaf:
            return {"file": str((folder / Path(leaf["file"]).expanduser()).absolute())}
        return leaf

    return redaction.map_leaves(options, absolute)


def resolve_secrets(options: Mapping[str, Any], key: str = "options") -> Any:
    """Copy options with each reference replaced by its secret, which `redact` knows from then on.

    Args:
        options: the value of `key` in a config.
        key: for messages.

    Raises:
        ConfigError: a variable or a file is missing or empty.
    """

    def resolve(path: redaction.KeyPath, leaf: Any, _: bool) -> Any:
        if not redaction.is_reference(leaf):
            return leaf
        try:
            secret = _from_environment(leaf["env"]) if "env" in leaf else _from_file(leaf["file"])
        except ValueError as error:
            raise ConfigError(f"{key}.{dotted(path)} must be {error}") from None
        redaction.remember(secret)
        return secret

    return redaction.map_leaves(options, resolve)


def secret_sources(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Environment variables, and paths of files, that a config takes secrets from."""
    references = [leaf for _, leaf, _ in redaction.leaves(config) if redaction.is_reference(leaf)]
    variables = [leaf["env"] for leaf in references if "env" in leaf]
    return variables, [leaf["file"] for leaf in references if "file" in leaf]


def redacted_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys, as in an override, of the values that redaction removed from a config."""
    return list(_keys(config, lambda leaf, _: redaction.holds_redacted(leaf)))


def secret_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys, as in an override, of all secrets: redacted ones, literals and references."""

    def is_secret(leaf: Any, secret: bool) -> bool:
        is_marked = secret or redaction.is_reference(leaf) or redaction.holds_redacted(leaf)
        return is_marked or redaction.redact(leaf) != leaf

    return list(_keys(config, is_secret))


def literal_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values that `redact` would remove from a config, by their keys, as in an override."""
    paths = _keys(redaction.redact(config), lambda leaf, _: redaction.holds_redacted(leaf))
    return {key: _value_at(config, path) for key, path in paths.items()}


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Keys, with dots, of the values that differ between two configs, but for their secrets.

    Example:
        >>> changed_keys({"train": {"steps": 5, "seed": 0}}, {"train": {"steps": 6, "seed": 0}})
        ['train.steps']
    """
    one, other = (
        {dotted(path): leaf for path, leaf, _ in redaction.leaves(redaction.redact(config))}
        for config in (before, after)
    )
    missing = object()
    return [key for key in one | other if one.get(key, missing) != other.get(key, missing)]


def check_whole(config: Mapping[str, Any]) -> None:
    """Check that redaction removed nothing from a config.

    Raises:
        ConfigError: it did; the message names the key and the cure.
    """
    for key in redacted_keys(config):
        raise ConfigError(
            f"{key} must be given again, since secrets are not written to files and this config "
            f"has {redaction.REDACTED} there: put {_FORMS} in its place, or add {key}=VALUE to the "
            f"command."
        )


def dotted(path: Iterable[str | int]) -> str:
    """Key of a path in a config, with quotes around names that hold a dot.

    Example:
        >>> dotted(("options", "headers", "X.Token"))
        'options.headers."X.Token"'
    """
    keys = [str(key) for key in path]
    return ".".join(f'"{key}"' if "." in key else key for key in keys)


def _keys(
    config: Mapping[str, Any], chosen: Callable[[Any, bool], bool]
) -> dict[str, redaction.KeyPath]:
    """Keys and paths of the chosen leaves; of a leaf in a list, those of the list."""
    paths: dict[str, redaction.KeyPath] = {}
    for path, leaf, is_secret in redaction.leaves(config):
        # Prompts are texts of their own: nothing is trained with what was redacted in them.
        if path[:1] != ("train",) and chosen(leaf, is_secret):
            names, kept = _override_path(config, path)
            paths.setdefault(dotted(names), kept)
    return paths


def _override_path(
    config: Mapping[str, Any], path: redaction.KeyPath
) -> tuple[redaction.KeyPath, redaction.KeyPath]:
    """Path as an override spells it, with the name of an entry for its index; and its prefix."""
    match path:
        case (("regularizers" | "rewards" | "evaluations") as table, int(index), *rest):
            entry = config[table][index]
            names: redaction.KeyPath = (table, str(entry.get("name") or entry.get("use")))
            kept: redaction.KeyPath = (table, index)
        case _:
            names, kept, rest = (), (), list(path)
    for key in rest:
        if isinstance(key, int):
            break
        names, kept = (*names, key), (*kept, key)
    return names, kept


def _value_at(config: Any, path: redaction.KeyPath) -> Any:
    for key in path:
        config = config[key]
    return config


def _from_environment(name: str) -> str:
    secret = os.environ.get(name, "")
    if not secret:
        state = "empty" if name in os.environ else "not set"
        raise ValueError(f"in the environment variable {name!r}, and that is {state}: set it")
    return secret


def _from_file(name: str) -> str:
    rule = f"in the file {name!r}"
    try:
        if not Path(name).is_file():  # a pipe or a device could block
            raise ValueError(f"{rule}, and there is none: write the secret to it")
        secret = Path(name).read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{rule}, and that cannot be read: {reason}") from None
    if not secret:
        raise ValueError(f"{rule}, and that is empty: write the secret to it")
    return secret
