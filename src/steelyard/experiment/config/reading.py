"""Read config files: overrides, validation, paths, imports, and the messages of what is wrong."""

from __future__ import annotations

import csv
import difflib
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from steelyard.errors import ConfigError, ModelError, RegistryError, SpecError, SteelyardError
from steelyard.experiment.config.data_tables import HUB, SOURCE_FORMS
from steelyard.experiment.config.schema import Config, ModelConfig, TermConfig
from steelyard.experiment.config.secrets import (
    check_whole,
    dotted,
    redacted_keys,
    resolve_files,
    secret_keys,
)
from steelyard.output.redaction import redact
from steelyard.spec.error_messages import describe_with_place, shorten

_RULES = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "too_short": "a list with at least one entry",
    "model_type": "a table",
    "string_too_short": "a non-empty string",
    "string_type": "a string",
}
_LIMITS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}
_MAX_SHOWN = 80  # characters of a value


def format_errors(error: ValidationError) -> str:
    """Format one line per error, such as `[[regularizers]] #2: weight must be >= 0, got -1`."""
    return "\n".join(_format_error(details) for details in error.errors())  # type: ignore[arg-type]  # a dict


def format_location(loc: Sequence[str | int]) -> str:
    """Format the location of a key as in TOML: `[train]: steps`, `[[regularizers]] #2: weight`.

    Example:
        >>> format_location(("regularizers", 1, "weight"))
        '[[regularizers]] #2: weight'
    """
    match list(loc):
        case [str(table), int(index), *keys]:
            head = f"[[{table}]] #{index + 1}"
        case [str(table), str(first), *rest]:
            head, keys = f"[{table}]", [first, *rest]
        case [key]:
            return f"[{key}]" if _is_table(str(key)) else str(key)
        case _:
            return "the config"
    return f"{head}: {'.'.join(str(key) for key in keys)}" if keys else head


def _format_error(details: dict[str, Any]) -> str:
    kind, context = details["type"], details.get("ctx", {})
    place = details["loc"]
    # Without the form of a source, which is no key: "prompts", "table", "size".
    loc = tuple(
        key
        for key, before in zip(place, ("", *place), strict=False)
        if not (key in SOURCE_FORMS and before in ("prompts", "path"))
    )
    location = format_location(loc)
    if kind == "missing":
        return f"{location} must be given, got nothing"
    if kind == "invalid_key":  # of YAML, which reads 1 as a number and yes as true
        return f"a key must be a string, got {details['input']!r}: write it in quotes"
    if kind == "extra_forbidden":  # its value is not shown: it may be a secret
        known = _keys_at(loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"; did you mean {near[0]}? Known" if near else "; known"
        return f"{location} is not a key{hint}: {', '.join(known)}"
    if kind == "value_error":
        rule = str(context["error"])
        if len(loc) <= 1 and _is_table(str(*loc)):  # a rule of a table names the values itself
            return rule if rule.startswith("[") else f"{location} {rule}"
    elif kind in _LIMITS:
        name, sign = _LIMITS[kind]
        rule = f"must be {sign} {context[name]:g}"
    elif kind == "literal_error":
        rule = f"must be one of {context['expected']}"
    else:
        rule = f"must be {_RULES.get(kind, details['msg'])}"
    return f"{location} {rule}, got {_shown(loc[-1] if loc else '', details['input'])}"


def _shown(key: str | int, value: Any) -> str:
    # Redacted before it is cut, which could split a secret.
    return shorten(repr(redact({key: value})[key]), _MAX_SHOWN)


def _is_table(key: str) -> bool:
    field = Config.model_fields.get(key)
    return field is None or _model_in(field.annotation) is not None


def _keys_at(loc: Sequence[str | int]) -> list[str]:
    model: type[BaseModel] = Config
    for key in loc:
        if isinstance(key, str):
            model = _model_in(model.model_fields[key].annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    # The annotation itself, the model of a list, or that of a union with None.
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    models = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in models if model is not None), None)


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
    config = validate_config(raw)
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
    return config if raw == config.model_dump(mode="json") else validate_config(raw)


def validate_config(raw: Mapping[str, Any]) -> Config:
    """Build a config from nested mappings.

    Raises:
        ConfigError: a key is unknown, or a value breaks its rule.
    """
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


def example_config(*, on_policy: bool = False) -> str:
    """Text of an example config file, as `steelyard config example` prints it.

    Args:
        on_policy: train on answers that the model samples, instead of lines of a file.
    """
    name = "example_on_policy.toml" if on_policy else "example.toml"
    return Path(__file__).with_name(name).read_text("utf-8")


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
    files: dict[str, Any] = {main: _resolve_source((key, main), folder, getattr(source, main))}
    if isinstance(source.held_out, str):
        files["held_out"] = _existing_file((key, "held_out"), folder, source.held_out)
    regularizers = [
        _with_data(entry, number, folder) for number, entry in enumerate(config.regularizers, 1)
    ]
    config = config.model_copy(update={"regularizers": regularizers})
    loss = config.loss.model_copy(update={"options": resolve_files(config.loss.options, folder)})
    entries = {
        table: [
            entry.model_copy(
                update={
                    key: resolve_files(getattr(entry, key), folder)
                    for key in ("options", "resources")
                    if key in type(entry).model_fields
                }
            )
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
    name = Path(model.base_model).expanduser()
    folders = [path for path in (folder / name, Path.cwd() / name) if path.is_dir()]
    if model.backend != "local" or (not folders and "/" in model.base_model):
        return model
    from steelyard.engine.model_sources import KNOWN_MODELS, cached_models  # noqa: PLC0415 - takes seconds

    if model.base_model in KNOWN_MODELS:
        return model
    if not folders:  # a short name is one of this machine's cache
        cached = cached_models().get(model.base_model)
        return model if cached is None else model.model_copy(update={"base_model": cached.hub_id})
    return model.model_copy(update={"base_model": str(folders[0].resolve())})


def _with_data(entry: TermConfig, number: int, folder: Path) -> TermConfig:
    """Make the paths of the data of a term's own absolute."""
    if entry.data is None:
        return entry
    files = {
        key: _existing_file(("regularizers", number - 1, "data", key), folder, value)
        for key, value in (("path", entry.data.path), ("held_out", entry.data.held_out))
        if isinstance(value, str)
    }
    return entry.model_copy(update={"data": entry.data.model_copy(update=files)})


def _resolve_source(loc: Sequence[str | int], folder: Path, given: Any) -> Any:
    """Make the paths of files and folders in a source absolute."""
    if isinstance(given, list):
        return [_resolve_source(loc, folder, source) for source in given]
    if isinstance(given, str):
        return _existing_file(loc, folder, given)
    if given.is_file:
        return given.model_copy(update={"use": _existing_file(loc, folder, given.use)})
    name = given.use.removeprefix(HUB)
    path = (folder / Path(name).expanduser()).resolve()
    changes: dict[str, Any] = {"options": resolve_files(given.options, folder)}
    if given.use.startswith(HUB) and (path.is_dir() or name.startswith((".", "/", "~"))):
        if not path.is_dir():
            where = format_location(loc)
            raise ConfigError(f"{where} must name a folder that exists, got {str(path)!r}")
        changes["use"] = f"{HUB}{path}"
    return given.model_copy(update=changes)


def _existing_file(loc: Sequence[str | int], folder: Path, name: str) -> str:
    path = (folder / Path(name).expanduser()).resolve()
    if not path.is_file():
        raise ConfigError(f"{format_location(loc)} must be a file that exists, got {str(path)!r}")
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


def import_modules(config: Config) -> None:
    """Import the modules that a config lists, from the folders that it lists.

    Raises:
        ConfigError: one is none.
    """
    sys.path[:0] = [folder for folder in config.python_path if folder not in sys.path]
    for module in config.imports:
        try:
            importlib.import_module(module)
        except SteelyardError:
            raise
        except ImportError as error:
            raise ConfigError(
                f"imports must be modules, and {module!r} is none: {error}"
            ) from error
        except Exception as error:  # a module is anybody's code
            raise ConfigError(
                redact(f"imports: {module!r} cannot be imported: {describe_with_place(error)}.")
            ) from error


@contextmanager
def locate_errors(location: str) -> Iterator[None]:
    """Add the place in the config to errors that are raised in the block.

    Raises:
        ConfigError: an error of the config, the registry, a spec or a base model was raised.
    """
    try:
        yield
    except RegistryError as error:
        raise ConfigError(redact(f"{location}: use: {error}")) from error
    except (ConfigError, ModelError, SpecError) as error:
        raise ConfigError(redact(f"{location}: {error}")) from error
