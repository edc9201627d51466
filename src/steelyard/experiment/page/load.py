"""Read run folders, and the folders of ablations and searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from steelyard.errors import RunError
from steelyard.experiment.compare.search_results import STUDY, Search, read_search
from steelyard.experiment.page.plain_files import (
    MAX_LINE,
    open_plain,
    read_last_objects,
    read_object,
)
from steelyard.experiment.page.series import RedactedTexts, RunSeries, parse_row
from steelyard.output.redaction import redact, remember
from steelyard.output.step_metrics import reward_names, skipped_terms, terms_that_ran

Row: TypeAlias = Mapping[str, Any]

CONFIG, DATA, METRICS, DRIVERS, ROLLOUTS, SAMPLES, FAILURE, ABLATION = (
    "config.json",
    "data.json",
    "metrics.jsonl",
    "drivers.jsonl",
    "rollouts.jsonl",
    "samples.jsonl",
    "failure.json",
    "ablation.json",
)
_MAX_RECORDS = 2**24  # bytes of samples, drivers or answers, from the end of the file

_NUMBERS = (float, int)  # as JSON has them, without booleans
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
        failure: row of the step that failed; None if none did.
        damaged: number of lines of the metrics that are left out.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Row]
    samples: Sequence[Mapping[str, Any]] = field(default=())
    drivers: Sequence[Mapping[str, Any]] = field(default=())
    rollouts: Sequence[Mapping[str, Any]] = field(default=())
    data: Mapping[str, str] = field(default_factory=dict)
    failure: Row | None = None
    damaged: int = 0

    def settings(self, table: str) -> Any:
        """A table of the config; files of data are told apart by what they hold, not by a path."""
        settings = self.config.get(table)
        if not isinstance(settings, dict):
            return settings
        return {
            key: self.data.get(value, value) if isinstance(value, str) else value
            for key, value in settings.items()
        }

    @cached_property
    def terms(self) -> list[str]:
        """Names of the regularizers in the metrics, those of the config first, in its order."""
        configured = [term_name(term) for term in configured_terms(self.config)]
        seen = [name for row in self.rows for name in (*terms_that_ran(row), *skipped_terms(row))]
        measured = list(dict.fromkeys(seen))
        return [name for name in dict.fromkeys(configured) if name in measured] + [
            name for name in measured if name not in configured
        ]

    @cached_property
    def rewards(self) -> list[str]:
        """Names of the rewards in the metrics; none without rollouts."""
        return list(dict.fromkeys(name for row in self.rows for name in reward_names(row)))

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps that have a metric, and its values there."""
        return self._columns.get(key, ([], []))

    def curves(self) -> RunSeries:
        """The same metrics by key."""
        series = RunSeries.of_rows(self.folder / METRICS, self.rows, self._columns)
        series.damaged = self.damaged
        return series

    @cached_property
    def _columns(self) -> dict[str, tuple[list[int], list[float]]]:
        # In one pass over the rows: to look up one key in each of 10,000 rows takes longer.
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.rows:
            step = row["step"]
            for key, value in row.items():
                if type(value) in _NUMBERS:
                    column = columns.get(key)
                    if column is None:
                        column = columns[key] = [], []
                    column[0].append(step)
                    column[1].append(value)
        return columns


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
    loaded = [load_run(name, folder, answers=alone) for name, folder in _unique_names(named)]
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
    return Experiment([load_run(best.name, best)], search=search)


def _load_ablation(folder: Path) -> Experiment:
    folders = _ablation_runs(folder)
    prefix = "without "
    without = {name.removeprefix(prefix): name for name in folders if name.startswith(prefix)}
    runs = [load_run(name, path) for name, path in folders.items()]
    first, *others = (read_object(folder / ABLATION).get("seeds") or {"0": {}}).items()
    seeds = {first[0]: runs} | {
        seed: [load_run(name, path) for name, path in _started(folder, subfolders).items()]
        for seed, subfolders in others
    }
    return Experiment(runs, without, "all" if "all" in folders else None, seeds)


def _ablation_runs(folder: Path) -> dict[str, Path]:
    path = folder / ABLATION
    runs = read_object(path).get("runs")
    if not isinstance(runs, dict) or not all(isinstance(each, str) for each in runs.values()):
        raise RunError(f"{path} must have 'runs', folders by name, got {runs!r}.")
    started = _started(folder, runs)
    if not started:
        raise RunError(f"{folder} is an ablation of which no run has begun: run it first.")
    return started


def _started(folder: Path, subfolders: Mapping[str, str]) -> dict[str, Path]:
    """Folders of the runs that an ablation has begun; an interrupted one lacks some."""
    folder = folder.resolve()
    folders = {name: folder / subfolder for name, subfolder in subfolders.items()}
    return {
        name: path
        for name, path in folders.items()
        # What a file from somebody else names is read only inside its folder.
        if path.resolve() == path and path.is_relative_to(folder) and _has_steps(path)
    }


def _has_steps(path: Path) -> bool:
    return (path / METRICS).is_file() and (path / METRICS).stat().st_size > 0


def load_run(name: str, folder: Path, *, answers: bool = False) -> LoadedRun:
    """Load one run; lines of its files that are damaged are left out.

    Args:
        name: name of the run.
        folder: its folder.
        answers: whether to read its answers, of which there may be many.

    Raises:
        RunError: the folder is no run, or no step is on record yet.
    """
    missing = [file for file in (CONFIG, METRICS) if not (folder / file).is_file()]
    if missing:
        what = "is no run folder" if folder.is_dir() else "is no folder"
        raise RunError(
            f"{folder} {what}: a run has {CONFIG} and {METRICS}, missing {' and '.join(missing)}. "
            f"Give the folder that 'steelyard train', 'ablate' or 'tune' made."
        )
    config = read_config_file(folder)  # first: its secrets are redacted in what follows
    rows, damaged = _read_metrics(folder / METRICS)
    rollouts, whole = _read_records(folder / ROLLOUTS, "answer") if answers else ([], True)
    return LoadedRun(
        name,
        folder,
        config,
        rows,
        _read_records(folder / SAMPLES, "prompt")[0],
        _read_records(folder / DRIVERS, "data")[0],
        rollouts if whole else [],  # the sums over some of the answers would be wrong
        read_object(folder / DATA),
        redact(read_object(folder / FAILURE)) or None,
        damaged,
    )


def read_config_file(folder: Path) -> dict[str, Any]:
    """Config of a run with secrets redacted; empty if it is damaged, without damaged tables."""
    config = read_object(folder / CONFIG)
    for table in _TABLES:
        if not isinstance(config.get(table, {}), dict):
            del config[table]
    remember(config)  # a run of an older version, or a config edited since, may hold secrets
    return redact(config)


def _read_metrics(path: Path) -> tuple[list[Row], int]:
    """The last row of each step, in the order of the steps, and the number of damaged lines."""
    by_step: dict[int, Row] = {}
    damaged = 0
    texts = RedactedTexts()
    try:
        with open_plain(path) as file:
            while line := file.readline(MAX_LINE):
                row = parse_row(line)
                if row is None:
                    # The run may still write a last line without an end.
                    damaged += bool(line.strip()) and line.endswith(b"\n")
                    continue
                by_step[row["step"]] = texts.redact(row)
    except OSError as error:
        raise RunError(f"{path} must be a file that can be read: {error}.") from error
    if not by_step:
        raise RunError(f"{path} must have at least one step, got none yet.")
    return [by_step[step] for step in sorted(by_step)], damaged


def _read_records(path: Path, required: str) -> tuple[list[dict[str, Any]], bool]:
    """Objects of a file that have a field, without secrets, and whether these are all."""
    records, whole = read_last_objects(path, _MAX_RECORDS)
    return redact([record for record in records if required in record]), whole


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
