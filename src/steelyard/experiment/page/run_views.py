"""Documents of the runs in a folder, kept while they grow: what the server answers with."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from steelyard._version import __version__
from steelyard.doctor.examination import Doctor, diagnose
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding, worst_first
from steelyard.errors import RunError
from steelyard.experiment.page.comparison import (
    COMPARED_GROUPS,
    baseline_of,
    compare_document,
    comparison_charts,
)
from steelyard.experiment.page.load import (
    METRICS,
    Experiment,
    load_run,
    load_runs,
    read_config_file,
)
from steelyard.experiment.page.plain_files import parse_object, read_small
from steelyard.experiment.page.run_document import (
    Document,
    changes,
    curves_document,
    summary_document,
)
from steelyard.experiment.page.run_index import RunIndex, RunSummary, file_signature
from steelyard.experiment.page.run_statistics import statistics_of
from steelyard.experiment.page.series import Position, RedactedTexts, RunSeries, rows_after
from steelyard.output.redaction import redact

T = TypeVar("T")

_MAX_RUNS = 16  # whose metrics are kept in memory; 10,000 steps of 7 terms take 15 MB
_LONG = 2000  # steps; the summary of more takes longer than a page may wait
_MAX_COMPARED = 32
_BLOCK = 2**21  # bytes of metrics that are read at once
_START = Position.after(b"", 0)
_PAUSE = 10  # times as long as it took to make a summary, before it is made again
_FILES = (METRICS, "config.json", "failure.json", "result.json", "changes.jsonl")


@dataclass
class _Summary:
    signature: tuple[Any, ...]
    document: Document
    good_until: float


class RunViews:
    """Documents of the runs of an index; the metrics of those that were viewed last are kept."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._series: dict[str, RunSeries] = {}
        self._findings: dict[str, FindingsReader] = {}
        self._summaries: dict[str, _Summary] = {}
        self._lock = threading.Lock()

    def list(self) -> Document:
        """List of the runs and their groups."""
        runs = self.index.list()
        return {
            "folder": str(self.index.folder),
            "version": __version__,
            "runs": [_listed(run) for run in runs],
            "groups": [asdict(group) for group in self.index.groups(runs)],
        }

    def series(self, name: str) -> RunSeries:
        """Metrics of a run.

        Raises:
            RunError: there is no such run.
        """
        path = self.index.path(name) / METRICS
        with self._lock:
            series = self._series.get(name) or RunSeries(path)
            _keep(self._series, name, series)
        return series

    def findings(self, name: str) -> Document:
        """Findings of a run, those that last first.

        Raises:
            RunError: there is no such run.
        """
        return {"records": [finding.to_dict() for finding in self._diagnose(name)], "whole": True}

    def view(self, name: str, *, smoothing: float, groups: Collection[str] = ()) -> Document:
        """Document of a run; of a long one that was not viewed before, its curves alone.

        Its summary is then asked for by itself: the doctor takes seconds to see 10,000 steps.

        Args:
            name: name of the run in the index.
            smoothing: factor of the moving average, from 0 (none) to below 1.
            groups: groups of charts, see `Chart`, and `"cosines"`, the heat-map; all if empty.
        """
        curves = self._curves(name, smoothing=smoothing, groups=groups)
        if curves["steps"] > _LONG and name not in self._summaries:
            pending = self._begin(name, self.index.path(name)) | _EMPTY
            relatives = self._relatives(name)
            return pending | {"pending": True, "changes": [], "relatives": relatives} | curves
        return self.summary(name) | curves

    def summary(self, name: str) -> Document:
        """Document of a run without its curves; of a long run that grows it may be seconds old."""
        path = self.index.path(name)
        signature = tuple(file_signature(path / file) for file in _FILES)
        with self._lock:
            kept = self._summaries.get(name)
        fresh = kept is not None and time.monotonic() < kept.good_until
        if kept is not None and (kept.signature == signature or fresh):
            document = kept.document
        else:
            began = time.monotonic()
            document = self._summarize(name, path)
            ended = time.monotonic()
            made = _Summary(signature, document, ended + _PAUSE * (ended - began))
            with self._lock:
                _keep(self._summaries, name, made)
        with self.series(name).lock:
            still = self._curves(name, smoothing=0, groups=("none",))["constants"]
        return document | {"constants": still, "relatives": self._relatives(name)}

    def compare(
        self, names: Sequence[str], group: str | None = None, *, smoothing: float = 0.0
    ) -> Document:
        """Document of several runs, or of a group of the list.

        Args:
            names: names of the runs.
            group: name of the group, instead of names.
            smoothing: factor of the moving average, from 0 (none) to below 1.

        Raises:
            RunError: there is no such run or group, or it has no step yet.
        """
        experiment, kind = self._experiment(names, group)
        document = compare_document(experiment, self._name_of, kind)
        shown = document["runs"]
        views = {
            run["name"]: self._curves(run["name"], smoothing=smoothing, groups=COMPARED_GROUPS)
            for run in shown
        }
        marks = [
            {"step": change["step"], "text": change["text"], "run": run["name"]}
            for run in shown
            for change in changes(self.index.path(run["name"]))
        ]
        charts = comparison_charts(shown, views, document.pop("chart_notes"))
        return document | {"charts": charts, "views": views, "changes": marks}

    def _experiment(self, names: Sequence[str], group: str | None) -> tuple[Experiment, str]:
        if group is None:
            chosen = list(dict.fromkeys(names))[:_MAX_COMPARED]
            runs = [load_run(name, self.index.path(name)) for name in chosen]
            if not runs:
                raise RunError("a comparison needs at least one run, got none.")
            return Experiment(runs), "runs"
        listed = {each.name: each for each in self.index.groups(self.index.list())}
        path = self.index.group_path(group)
        if group not in listed:
            raise RunError(f"group must be one of the list, got {group[:99]!r}.")
        if path is not None:
            return load_runs([path]), listed[group].kind
        return self._experiment(listed[group].runs, None)[0], "seeds"

    def _curves(self, name: str, *, smoothing: float, groups: Collection[str]) -> Document:
        series = self.series(name)
        config = read_config_file(self.index.path(name))
        with series.lock:
            series.refresh()
            return curves_document(series, config, smoothing=smoothing, groups=groups)

    def _begin(self, name: str, path: Path) -> Document:
        train = read_config_file(path).get("train")
        planned = train.get("steps") if isinstance(train, dict) else None
        return {
            "name": name,
            "title": path.name,
            "planned": planned if isinstance(planned, int) else None,
            "baseline": None,
            "pending": False,
        }

    def _summarize(self, name: str, path: Path) -> Document:
        below = path.parent.is_relative_to(self.index.folder)
        baseline = baseline_of(path) if below else None
        document = self._begin(name, path)
        if baseline is not None:
            document["baseline"] = {
                "run": self._name_of(baseline.without),
                "group": self._name_of(path.parent),
            }
        try:
            run = load_run(name, path, answers=True)
        except RunError:  # before its first step
            return document | _EMPTY | {"headline": "No step yet.", "changes": changes(path)}
        found = statistics_of(run, self._diagnose(name))
        series = self.series(name)
        with series.lock:
            series.refresh()
            sentence = None if baseline is None else baseline.sentence
            return document | summary_document(run, found, series=series, baseline=sentence)

    def _diagnose(self, name: str) -> Sequence[Finding]:
        path = self.index.path(name)
        with self._lock:
            reader = self._findings.get(name) or FindingsReader(path)
            _keep(self._findings, name, reader)
            return reader.read()

    def _relatives(self, name: str) -> Document:
        runs = {run.name: run for run in self.index.list()}
        own = runs.get(name)
        parent = None if own is None else own.branch_of
        return {
            "parent": _relative(own, parent) if parent is not None else None,
            "branches": [
                _relative(run, run.name) for run in runs.values() if run.branch_of == name
            ],
        }

    def _name_of(self, path: Path) -> str:
        return path.resolve().relative_to(self.index.folder).as_posix()


_EMPTY: Document = {
    "headline": "",
    "sentences": [],
    "facts": [],
    "findings": [],
    "terms": [],
    "terms_caption": "",
    "rewards": [],
    "rewards_caption": "",
    "failure": None,
}


def _keep(kept: dict[str, T], name: str, value: T) -> None:
    """Put a value last, and drop the one that was used longest ago if there are too many."""
    kept.pop(name, None)
    kept[name] = value
    while len(kept) > _MAX_RUNS:
        del kept[next(iter(kept))]


def _listed(run: RunSummary) -> Document:
    document = asdict(run)
    del document["digest"], document["branch_step"]
    return document | {
        "held_out": run.last.get("held_out/reward", run.last.get("held_out/loss")),
        "base": run.last.get("base_loss/value"),
    }


def _relative(run: RunSummary | None, shown: str) -> Document:
    step = None if run is None else run.branch_step
    return {"name": shown, "step": step, "text": f"{shown}, at step {step}"}


class FindingsReader:
    """Lets a doctor see the rows of a run; `read` goes on where the last call ended.

    Of a step that is there twice the last row counts: a trainer adds its evaluation in a second.

    Args:
        run: run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._position = _START
        self._last: dict[str, Any] | None = None  # the last row, which the doctor has not seen
        self._ended: list[Finding] = []
        self._begin()

    def read(self) -> list[Finding]:
        """Findings that last, the worst first, and those that have ended, the last one first."""
        while True:
            added = rows_after(self._run / METRICS, self._position, _BLOCK)
            if added is None:  # a resumed run has cut its metrics
                self._begin()
                continue
            rows, position = added
            if position == self._position:
                break
            self._position = position
            for row in map(self._texts.redact, rows):
                if self._last is not None:
                    if row["step"] < self._last["step"]:
                        continue
                    if row["step"] > self._last["step"]:
                        self._ended += _ended_at(self._last, self._doctor)
                self._last = row
        doctor, ended = self._doctor, self._ended
        if self._last is not None:  # by a copy: another row of this step may follow
            doctor = deepcopy(doctor)
            ended = [*ended, *_ended_at(self._last, doctor)]
        return [*worst_first([*self._failures(), *doctor.findings]), *ended[::-1]]

    def _begin(self) -> None:
        self._doctor = Doctor(Facts.of_config(read_config_file(self._run)))
        self._position = _START
        self._last = None
        self._ended = []
        self._texts = RedactedTexts()  # a rule reads no text inside a list or a table

    def _failures(self) -> list[Finding]:
        """The finding about the step that failed, which is no line of the metrics."""
        try:
            row = parse_object(read_small(self._run / "failure.json"))
        except OSError:
            return []
        found = diagnose(self._doctor.facts, [] if row is None else [redact(row)])
        return [finding for finding in found if finding.rule == "failed"]


def _ended_at(row: dict[str, Any], doctor: Doctor) -> list[Finding]:
    """Findings that end with this row, which the doctor is shown."""
    return [f for f in doctor.observe(row["step"], row) if f.ended is not None]
