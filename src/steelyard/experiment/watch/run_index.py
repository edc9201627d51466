"""List of the runs in a folder, from the first and the last line of their metrics."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from steelyard.errors import RunError
from steelyard.experiment.run_state import inode_of, locked_files
from steelyard.experiment.secrets import redact, remember
from steelyard.experiment.watch.plain_files import (
    parse_object,
    read_first_line,
    read_last,
    read_small,
)
from steelyard.experiment.watch.series import parse_row
from steelyard.spec import is_finite

_log = logging.getLogger(__name__)

State: TypeAlias = Literal["running", "paused", "stopped", "done"]

METRICS = "metrics.jsonl"
_MAX_DEPTH = 4  # seeds of a trial of a search lie two folders below the search
_NO_RUNS = ("checkpoints", "tensorboard", "wandb")
_SHOWN = ("loss_total", "base_loss/value", "held_out/loss", "rollouts/reward", "seconds")
# A run on another machine, whose lock cannot be seen, counts as running for so long after a step.
_FRESH_SECONDS = 10.0
_FRESH_STEPS = 3
_PAUSE = 20  # times as long as a search for runs took
# A file is unchanged while its time, size and inode are.
_Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True)
class RunSummary:
    """One run of the list.

    Attributes:
        name: its path below the watched folder, `"."` for that folder itself.
        steps: number of steps made so far.
        planned: number of steps in the config, if it can be read.
        state: whether a process trains it or waits, it ended before the last step, or it is done.
        began: time of the first step, in seconds since 1970.
        updated: time of the last change of its metrics, or of its config before the first step.
        first: losses, reward and seconds of the first step.
        last: the same of the last step.
    """

    name: str
    steps: int
    planned: int | None
    state: State
    began: float | None
    updated: float
    first: dict[str, float]
    last: dict[str, float]


class RunIndex:
    """The runs below a folder.

    Args:
        folder: the folder; it may be a run itself.

    Raises:
        RunError: it is no folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise RunError(
                f"{self.folder} must be a folder of runs, and it is none: give the folder that "
                f"'steelyard train' writes runs to, such as runs."
            )
        self.folder = self.folder.resolve()
        self._known: dict[str, Path] = {}
        self._next_scan = 0.0
        self._rows: dict[str, tuple[_Signature, RunSummary]] = {}

    def list(self) -> list[RunSummary]:
        """Summaries of all runs, the one that changed last first."""
        if time.monotonic() >= self._next_scan:
            self._scan()
        locked = locked_files()
        found = [self._summary(name, path, locked) for name, path in self._known.items()]
        return sorted(found, key=lambda run: (-run.updated, run.name))

    def path(self, name: str) -> Path:
        """Folder of a run in the list.

        Raises:
            RunError: there is no such run.
        """
        if name not in self._known:
            self._scan()
        path = self._known.get(name)
        # A folder of the path may have become a link since it was found.
        if path is None or path.resolve() != path:
            raise RunError(f"run must be one of the list, got {name[:99]!r}.")
        return path

    def _scan(self) -> None:
        began = time.monotonic()
        self._known = dict(self._find(self.folder, _MAX_DEPTH))
        ended = time.monotonic()
        # A folder with many others, such as a whole project, is searched less often.
        self._next_scan = ended + _PAUSE * (ended - began)

    def _find(self, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:  # not readable, or removed since it was found
            return
        if any(e.name == "config.json" and e.is_file(follow_symlinks=False) for e in entries):
            yield folder.relative_to(self.folder).as_posix(), folder
        for entry in entries:
            hidden = entry.name.startswith(".") or entry.name in _NO_RUNS
            if depth and not hidden and entry.is_dir(follow_symlinks=False):
                yield from self._find(Path(entry.path), depth - 1)

    def _summary(self, name: str, path: Path, locked: frozenset[int]) -> RunSummary:
        files = [path / each for each in (METRICS, "config.json", "result.json", ".lock")]
        signature = tuple(_signature(file) for file in files)
        known = self._rows.get(name)
        if known is None or known[0] != signature:
            try:
                known = signature, _read_summary(name, path)
            except Exception:  # noqa: BLE001 - a damaged run must not hide the others
                _log.exception("the run %s cannot be summarised", path)
                known = signature, RunSummary(name, 0, None, "stopped", None, 0.0, {}, {})
            self._rows[name] = known
        summary = known[1]
        if summary.state == "done":
            return summary
        fresh = max(_FRESH_SECONDS, _FRESH_STEPS * summary.last.get("seconds", 0.0))
        running = inode_of(path / ".lock") in locked or time.time() < summary.updated + fresh
        going: State = "paused" if (path / "paused").is_file() else "running"
        return replace(summary, state=going if running else "stopped")


def _read_summary(name: str, path: Path) -> RunSummary:
    config = read_config_file(path)
    first = parse_row(read_first_line(path / METRICS)) or {}
    last = read_last(path / METRICS, parse_row) or {}
    changed = _signature(path / METRICS) or _signature(path / "config.json")
    train = config.get("train")
    planned = train.get("steps") if isinstance(train, dict) else None
    return RunSummary(
        name=name,
        steps=last.get("step", -1) + 1,
        planned=planned if isinstance(planned, int) else None,
        state="done" if _signature(path / "result.json") else "stopped",
        began=first["time"] if is_number(first.get("time")) else None,
        updated=changed[0] / 1e9 if changed else 0.0,
        first={key: first[key] for key in _SHOWN if is_number(first.get(key))},
        last={key: last[key] for key in _SHOWN if is_number(last.get(key))},
    )


def read_config_file(path: Path) -> dict[str, Any]:
    """Config of a run with secrets redacted; empty if it is damaged."""
    try:
        config = parse_object(read_small(path / "config.json")) or {}
    except OSError:
        config = {}
    remember(config)  # a run of an older version, or a config edited since, may hold secrets
    return redact(config)


def is_number(value: Any) -> bool:
    """Return whether a metric is a number that a finite float can hold."""
    return type(value) in (int, float) and is_finite(value)


def _signature(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.lstat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
