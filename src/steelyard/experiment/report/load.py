"""Read run folders, and the folders of ablations and searches."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from steelyard.errors import RunError
from steelyard.experiment.search import STUDY, Search, read_search
from steelyard.experiment.secrets import redact, remember
from steelyard.experiment.step_metrics import reward_names, skipped_terms, terms_that_ran

Row: TypeAlias = Mapping[str, Any]

CONFIG, DATA, METRICS, DRIVERS, ROLLOUTS, SAMPLES, ABLATION = (
    "config.json",
    "data.json",
    "metrics.jsonl",
    "drivers.jsonl",
    "rollouts.jsonl",
    "samples.jsonl",
    "ablation.json",
)

_TABLES = ("model", "train", "loss", "rollouts")  # of a config, which the report reads


@dataclass(frozen=True)
class LoadedRun:
    """Contents of one run folder.

    Attributes:
        name: name of the run in the report, unique there.
        folder: the run folder.
        config: the resolved config.
        rows: metrics of each step, in the order of the steps.
        samples: completions of fixed prompts, before and after training.
        drivers: records of the examples that drive each term, see `driver_records`.
        rollouts: records of the answers of an on-policy run, see `RunFolder.rollouts`; empty where
            several runs are loaded.
        data: digests of the data files by their path, those of the training data first; empty
            where they are not on record.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Row]
    samples: Sequence[Mapping[str, Any]] = field(default=())
    drivers: Sequence[Mapping[str, Any]] = field(default=())
    rollouts: Sequence[Mapping[str, Any]] = field(default=())
    data: Mapping[str, str] = field(default_factory=dict)

    def settings(self, table: str) -> Any:
        """A table of the config; files of data are told apart by what they hold, not by a path."""
        settings = self.config.get(table)
        if not isinstance(settings, dict):
            return settings
        return {
            key: self.data.get(value, value) if isinstance(value, str) else value
            for key, value in settings.items()
        }

    @property
    def terms(self) -> list[str]:
        """Names of the regularizers in the metrics, those of the config first, in its order."""
        configured = [term_name(term) for term in configured_terms(self.config)]
        seen = [name for row in self.rows for name in (*terms_that_ran(row), *skipped_terms(row))]
        measured = list(dict.fromkeys(seen))
        return [name for name in dict.fromkeys(configured) if name in measured] + [
            name for name in measured if name not in configured
        ]

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards in the metrics; none without rollouts."""
        return list(dict.fromkeys(name for row in self.rows for name in reward_names(row)))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps that have a metric, and its values there."""
        points = [(row["step"], row[key]) for row in self.rows if _is_number(row.get(key))]
        return [step for step, _ in points], [value for _, value in points]


@dataclass(frozen=True)
class Experiment:
    """The runs of one report.

    Attributes:
        runs: one run or several, with distinct names; of an ablation with several seeds those of
            the first seed, of a search that of the best trial.
        without: for an ablation: the name of the run without a term, by term.
        full: for an ablation: the name of the run with all terms.
        seeds: for an ablation: the runs with each seed, those in `runs` included.
        search: for a search: all of its trials.
    """

    runs: Sequence[LoadedRun]
    without: Mapping[str, str] = field(default_factory=dict)
    full: str | None = None
    seeds: Mapping[str, Sequence[LoadedRun]] = field(default_factory=dict)
    search: Search | None = None


def load_runs(folders: Sequence[Path]) -> Experiment:
    """Load the runs in these folders; the folder of an ablation gives all of its runs.

    Raises:
        RunError: no folder is given, or one is not a run or has no metrics yet; or one is that of
            a search without a completed trial, or of a search among other folders.
        MissingExtraError: it is that of a search, and Optuna is not installed.
    """
    if not folders:
        raise RunError("a report needs at least one run folder, got none.")
    if len(folders) == 1 and (folders[0] / ABLATION).is_file():
        return _load_ablation(folders[0])
    searches = [folder for folder in folders if (folder / STUDY).is_file()]
    if searches and len(folders) > 1:
        raise RunError(
            f"{searches[0]} is a search, and has a report of its own: give its folder alone, or "
            f"folders of its trials."
        )
    if searches:
        return _load_search(searches[0])
    named: list[tuple[str, Path]] = []
    for folder in folders:
        if (folder / ABLATION).is_file():
            runs = _ablation_runs(folder)
            named += [(f"{_folder_name(folder)}: {name}", path) for name, path in runs.items()]
        else:
            named.append((_folder_name(folder), folder))
    alone = len(named) == 1
    loaded = [_load_run(name, folder, answers=alone) for name, folder in _unique_names(named)]
    return Experiment(loaded)


def _load_search(folder: Path) -> Experiment:
    search = read_search(folder)
    if not search.completed:
        states = Counter(trial.state for trial in search.trials)
        counts = ", ".join(f"{count} {state}" for state, count in states.items()) or "no trial"
        raise RunError(
            f"{folder} must have a completed trial for a report, got {counts}: continue the "
            f"search, or read log.txt of its trials."
        )
    best = search.completed[0].runs[0]
    return Experiment([_load_run(best.name, best)], search=search)


def _load_ablation(folder: Path) -> Experiment:
    folders = _ablation_runs(folder)
    prefix = "without "
    without = {name.removeprefix(prefix): name for name in folders if name.startswith(prefix)}
    runs = [_load_run(name, path) for name, path in folders.items()]
    first, *others = (_read_json(folder / ABLATION).get("seeds") or {"0": {}}).items()
    seeds = {first[0]: runs} | {
        seed: [_load_run(name, path) for name, path in _started(folder, subfolders).items()]
        for seed, subfolders in others
    }
    return Experiment(runs, without, "all" if "all" in folders else None, seeds)


def _ablation_runs(folder: Path) -> dict[str, Path]:
    path = folder / ABLATION
    runs = _read_json(path).get("runs")
    if not isinstance(runs, dict) or not all(isinstance(each, str) for each in runs.values()):
        raise RunError(f"{path} must have 'runs', folders by name, got {runs!r}.")
    started = _started(folder, runs)
    if not started:
        raise RunError(f"{folder} is an ablation of which no run has begun: run it first.")
    return started


def _started(folder: Path, subfolders: Mapping[str, str]) -> dict[str, Path]:
    """Folders of the runs that an ablation has begun; an interrupted one lacks some."""
    folders = {name: folder / subfolder for name, subfolder in subfolders.items()}
    return {
        name: path
        for name, path in folders.items()
        if (path / METRICS).is_file() and (path / METRICS).stat().st_size
    }


def _load_run(name: str, folder: Path, *, answers: bool = False) -> LoadedRun:
    missing = [each for each in (CONFIG, METRICS) if not (folder / each).is_file()]
    if missing:
        what = "is no run folder" if folder.is_dir() else "is no folder"
        raise RunError(
            f"{folder} {what}: a run has {CONFIG} and {METRICS}, missing {' and '.join(missing)}. "
            f"Give the folder that 'steelyard train', 'ablate' or 'tune' made."
        )
    by_step = _read_metrics(folder / METRICS)
    config = _read_config(folder / CONFIG)
    remember(config)  # a run of an older version, or a config edited since, may hold secrets
    return LoadedRun(
        name,
        folder,
        redact(config),
        redact([by_step[step] for step in sorted(by_step)]),
        _read_records(folder / SAMPLES, "prompt"),
        _read_records(folder / DRIVERS, "data"),
        # Only the report of a single run shows answers, and there may be many.
        _read_records(folder / ROLLOUTS, "answer") if answers else [],
        _read_json(folder / DATA) if (folder / DATA).is_file() else {},
    )


def _read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step, without an order of the steps."""
    by_step = {}
    for row in _read_lines(path, required="step"):
        step = row["step"]
        if not _is_number(step):
            raise RunError(f"{path} must have a number as each step, got {step!r}.")
        # A resumed run may have written a step twice: the later line replaces the earlier one.
        by_step[step] = row
    if not by_step:
        raise RunError(f"{path} must have at least one step, got none yet.")
    return by_step


def _read_config(path: Path) -> dict[str, Any]:
    config = _read_json(path)
    for table in _TABLES:
        found = config.get(table)
        if found is not None and not isinstance(found, dict):
            raise RunError(f"{path} must have a table {table!r}, got a {type(found).__name__}.")
    return config


def _read_records(path: Path, required: str) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file without secrets; none if there is no such file."""
    return redact(list(_read_lines(path, required))) if path.is_file() else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} must be JSON, got something else: {error}.") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} must be a JSON object, got a {type(value).__name__}.")
    return value


def _read_lines(path: Path, required: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; an incomplete last line is ignored.

    The run may still be writing: a last line without its newline that does not parse is not an
    error. Lines are split as bytes, since the cut may be inside a UTF-8 character.
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no newline follows it
                return
            raise RunError(f"{path}, line {number}, must be JSON: {error}.") from error
        if not isinstance(value, dict) or required not in value:
            raise RunError(f"{path}, line {number}, must be an object with {required!r}.")
        yield value


def _folder_name(folder: Path) -> str:
    return folder.resolve().name or str(folder)


def _unique_names(named: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Make names unique: add the parent folder to equal ones, then number those still equal."""
    names = [name for name, _ in named]
    prefixed = [
        f"{folder.resolve().parent.name}/{name}" if names.count(name) > 1 else name
        for name, folder in named
    ]
    return [
        (name if prefixed.count(name) == 1 else f"{name} ({prefixed[:i].count(name) + 1})", folder)
        for i, (name, (_, folder)) in enumerate(zip(prefixed, named, strict=True))
    ]


def term_name(term: Mapping[str, Any]) -> str:
    """Name of a regularizer in a config: `name`, or `use` where none is given."""
    return str(term.get("name") or term.get("use"))


def configured_terms(
    config: Mapping[str, Any], table: str = "regularizers"
) -> list[Mapping[str, Any]]:
    """Regularizers or rewards of a config; entries that are not tables are left out."""
    terms = config.get(table)
    return [term for term in terms if isinstance(term, dict)] if isinstance(terms, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
