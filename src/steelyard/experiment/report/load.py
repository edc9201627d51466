"""Reading what runs left behind: run folders, and folders of an ablation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from steelyard.errors import RunError
from steelyard.experiment.step_metrics import skipped_terms, terms_that_ran

Row: TypeAlias = Mapping[str, Any]

CONFIG, METRICS, SAMPLES, ABLATION = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "ablation.json",
)


@dataclass(frozen=True)
class LoadedRun:
    """One run folder, read.

    Attributes:
        name: what the report calls it.
        folder: where it is.
        config: the resolved config.
        rows: the metrics of each step, in the order of the steps.
        samples: what the model answered to fixed prompts, before and after.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Row]
    samples: Sequence[Mapping[str, Any]] = field(default=())

    @property
    def terms(self) -> list[str]:
        """The regularizers' names: those of the config, then any that only the metrics know."""
        given = self.config.get("regularizers")
        named = [str(each.get("name") or each.get("use")) for each in _mappings(given)]
        seen = [name for row in self.rows for name in (*terms_that_ran(row), *skipped_terms(row))]
        found = list(dict.fromkeys(seen))
        return [name for name in dict.fromkeys(named) if name in found] + [
            name for name in found if name not in named
        ]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric is there, and its values."""
        there = [(row["step"], row[key]) for row in self.rows if _is_number(row.get(key))]
        return [step for step, _ in there], [value for _, value in there]


@dataclass(frozen=True)
class Experiment:
    """What a report is about.

    Attributes:
        runs: one run or several, each with a name of its own.
        without: for an ablation: the run's name for each term that it left out.
        full: for an ablation: the name of the run with all terms.
    """

    runs: Sequence[LoadedRun]
    without: Mapping[str, str] = field(default_factory=dict)
    full: str | None = None


def read(folders: Sequence[Path]) -> Experiment:
    """The runs in these folders; an ablation's folder stands for all of its runs.

    Raises:
        RunError: there is none, or a folder is no run, or has nothing to show yet.
    """
    if not folders:
        raise RunError("a report needs at least one run folder, got none.")
    if len(folders) == 1 and (folders[0] / ABLATION).is_file():
        return _ablation(folders[0])
    named: list[tuple[str, Path]] = []
    for folder in folders:
        if (folder / ABLATION).is_file():
            inside = _runs_of(folder)
            named += [(f"{_name(folder)}: {name}", path) for name, path in inside.items()]
        else:
            named.append((_name(folder), folder))
    return Experiment([_run(name, folder) for name, folder in _distinct(named)])


def _ablation(folder: Path) -> Experiment:
    inside = _runs_of(folder)
    prefix = "without "
    without = {name.removeprefix(prefix): name for name in inside if name.startswith(prefix)}
    runs = [_run(name, path) for name, path in inside.items()]
    return Experiment(runs, without, "all" if "all" in inside else None)


def _runs_of(folder: Path) -> dict[str, Path]:
    path = folder / ABLATION
    runs = _json(path).get("runs")
    if not isinstance(runs, dict) or not all(isinstance(each, str) for each in runs.values()):
        raise RunError(f"{path} must have 'runs', folders by name, got {runs!r}.")
    # A run that an interrupted ablation has not begun is left out.
    found = {name: folder / inside for name, inside in runs.items()}
    begun = {name: path for name, path in found.items() if (path / METRICS).is_file()}
    if not begun:
        raise RunError(f"{folder} is an ablation of which no run has begun: run it first.")
    return begun


def _run(name: str, folder: Path) -> LoadedRun:
    missing = [each for each in (CONFIG, METRICS) if not (folder / each).is_file()]
    if missing:
        what = "is no run folder" if folder.is_dir() else "is no folder"
        raise RunError(
            f"{folder} {what}: a run has {CONFIG} and {METRICS}, missing {' and '.join(missing)}. "
            f"Give the folder that 'steelyard train' or 'steelyard ablate' made."
        )
    # After a resume a step may stand there twice: the later line is the one that counts.
    by_step = {row["step"]: row for row in _lines(folder / METRICS, needs="step")}
    if not by_step:
        raise RunError(f"{folder / METRICS} must have at least one step, got none yet.")
    samples = folder / SAMPLES
    return LoadedRun(
        name,
        folder,
        _json(folder / CONFIG),
        [by_step[step] for step in sorted(by_step)],
        list(_lines(samples, needs="prompt")) if samples.is_file() else [],
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} must be JSON, got something else: {error}.") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} must be a JSON object, got a {type(value).__name__}.")
    return value


def _lines(path: Path, needs: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that is half written does not count."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline came after it
                return
            raise RunError(f"{path}, line {number}, must be JSON: {error}.") from error
        if not isinstance(value, dict) or needs not in value:
            raise RunError(f"{path}, line {number}, must be an object with {needs!r}.")
        yield value


def _name(folder: Path) -> str:
    return folder.resolve().name or str(folder)


def _distinct(named: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Names made distinct: by the parent folder where two are alike, then by counting."""
    names = [name for name, _ in named]
    longer = [
        f"{folder.resolve().parent.name}/{name}" if names.count(name) > 1 else name
        for name, folder in named
    ]
    return [
        (name if longer.count(name) == 1 else f"{name} ({longer[:i].count(name) + 1})", folder)
        for i, (name, (_, folder)) in enumerate(zip(longer, named, strict=True))
    ]


def _mappings(given: Any) -> list[Mapping[str, Any]]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
