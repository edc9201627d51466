"""Collect what nodes need of this machine's disk: the folders of modules, and the data files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import RunError
from steelyard.experiment.config import Config

_LIMIT = 400 * 2**20  # bytes; Ray keeps packages of at most 500 MiB
# Folders of results, environments and caches. Names that begin with a dot stay here too: among
# them are .git, .venv and .env.
_LEFT_OUT = ("__pycache__", "node_modules", "venv", "runs", "checkpoints", "wandb", "mlruns")
_RESULTS = ("metrics.jsonl", "ablation.json", "study.db")


@dataclass(frozen=True)
class PathMap:
    """Paths on this machine, and where a node has the same files.

    Attributes:
        there: path on the node, by the path on this machine.
    """

    there: Mapping[str, str]

    def to_node(self, path: str) -> str:
        """Path of a file on the node; one that did not travel keeps its own."""
        for here in sorted(self.there, key=len, reverse=True):
            if path == here or path.startswith(f"{here}{os.sep}"):
                return self.there[here] + path.removeprefix(here)
        return path

    def to_driver(self, text: str, write: Callable[[str], str] = str) -> str:
        """Text with each path on the node replaced by that on this machine.

        `write` returns a path as it stands in the text.
        """
        for here in sorted(self.there, key=lambda each: len(self.there[each]), reverse=True):
            text = text.replace(write(self.there[here]), write(here))
        return text

    def config(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Config of a node: a copy of the JSON of a config, with its paths on the node."""

        def convert(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: convert(each) for key, each in value.items()}
            if isinstance(value, list):
                return [convert(each) for each in value]
            return self.to_node(value) if isinstance(value, str) and value[:1] == os.sep else value

        converted: dict[str, Any] = convert(raw)
        return converted


def pack(config: Config, results: Path, target: Path) -> dict[str, str]:
    """Copy modules and data to a folder that travels to the nodes.

    Args:
        config: its `python_path`, of which the folder of the config file is one, and its data.
        results: folder of the runs, which stays here.
        target: a new folder.

    Returns:
        Path in `target` of each folder and file that was copied from another place.

    Raises:
        RunError: it is more than Ray can send.
    """
    copied = _Copied(target, results.resolve())
    for number, folder in enumerate(sorted(set(config.python_path), key=len)):
        if not copied.holds(folder):
            copied.add(folder, f"path/{number}")
    source = config.source
    main = config.data.path if config.data is not None else getattr(source, "prompts", "")
    files = [main, source.held_out if isinstance(source.held_out, str) else main]
    for number, file in enumerate(dict.fromkeys(files)):
        if not copied.holds(file):
            copied.add(file, f"data/{number}/{Path(file).name}")
    return copied.paths


class _Copied:
    def __init__(self, target: Path, results: Path) -> None:
        self.paths: dict[str, str] = {}
        self._target, self._results = target, results
        self._sizes: dict[Path, int] = {}

    def holds(self, path: str) -> bool:
        there = PathMap({h: str(self._target / t) for h, t in self.paths.items()}).to_node(path)
        return there != path and Path(there).exists()

    def add(self, path: str, name: str) -> None:
        source = Path(path)
        files = [source] if source.is_file() else self._files(source)
        for file in files:
            self._sizes[file] = file.stat().st_size
            if sum(self._sizes.values()) > _LIMIT:
                raise self._too_large(path)
            there = self._target / name / file.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)
        self.paths[path] = name

    def _files(self, folder: Path) -> Iterator[Path]:
        for parent, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if self._travels(Path(parent) / name)]
            for name in files:
                file = Path(parent) / name
                if name[:1] != "." and file.is_file():
                    yield file

    def _travels(self, folder: Path) -> bool:
        return (
            folder.name[:1] != "."
            and folder.name not in _LEFT_OUT
            and folder.resolve() != self._results
            and not any((folder / name).exists() for name in _RESULTS)
        )

    def _too_large(self, path: str) -> RunError:
        largest = sorted(self._sizes, key=lambda file: -self._sizes[file])[:3]
        shown = ", ".join(f"{file} ({self._sizes[file] / 2**20:.0f} MiB)" for file in largest)
        return RunError(
            f"modules and data that travel to the nodes of a Ray cluster must have at most "
            f"{_LIMIT // 2**20} MiB, and {path} has more; the largest files are {shown}. Move the "
            f"config, its modules and its data to a folder of their own."
        )
