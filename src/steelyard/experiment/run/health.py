"""Findings of the doctor about runs: those that go on, and those on record in their folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.doctor.examination import Doctor, diagnose
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding
from steelyard.errors import RunError
from steelyard.experiment.config.schema import Config
from steelyard.output.redaction import redact, remember
from steelyard.output.run_files import RunFiles, are_of_run, read_json_object

_CONFIG, _METRICS = "config.json", "metrics.jsonl"
_MAX_DEPTH = 4  # seeds of a trial of a search lie two folders below the search


@dataclass(frozen=True)
class RunHealth:
    """Findings of the doctor about one run.

    Attributes:
        folder: the run folder.
        steps: number of steps on record.
        findings: those that last and those that have ended, in the order in which they began.
    """

    folder: Path
    steps: int
    findings: tuple[Finding, ...]

    @property
    def has_problem(self) -> bool:
        """Whether a problem lasts at the last step."""
        return bool(self.problems)

    @property
    def problems(self) -> list[str]:
        """Rules of the problems that last at the last step, each with its term or reward."""
        lasting = [f for f in self.findings if f.severity == "problem" and f.ended is None]
        return [
            f"{f.rule} ({f.subject.partition('/')[2]})" if "/" in f.subject else f.rule
            for f in lasting
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping of all fields."""
        findings = [finding.to_dict() for finding in self.findings]
        return {"run": str(self.folder), "steps": self.steps, "findings": findings}


def facts_of(config: Config) -> Facts:
    """Facts that a config declares of its run."""
    return Facts.of_config(config.model_dump(mode="json"))


def doctor_of(config: Config, rows: Iterable[Mapping[str, Any]]) -> Doctor:
    """Doctor that has seen the steps of a run so far, and says nothing about them again."""
    doctor = Doctor(facts_of(config))
    for row in rows:
        doctor.observe(row["step"], row)
    return doctor


def examine(folder: str | Path) -> list[RunHealth]:
    """Findings about the run in a folder, or about each of the runs below it.

    A run may be of an older version, or still be written: rules are silent where a metric is
    missing, and a line that is not complete is left out.

    Args:
        folder: a run folder, or one with several, such as that of an ablation or a search.

    Raises:
        RunError: it is no folder, or has no run; or a file of a run is damaged.
    """
    path = Path(folder).expanduser()
    runs = sorted(_runs_below(path, _MAX_DEPTH)) if path.is_dir() else []
    if not runs:
        what = "has no run" if path.is_dir() else "is no folder"
        raise RunError(
            f"{path} {what}: a run has {_CONFIG} and {_METRICS}. Give the folder of a run, or one "
            f"with runs in it."
        )
    return [_examine(run) for run in runs]


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    entries = list(folder.iterdir())
    if are_of_run({entry.name for entry in entries if entry.is_file()}):
        yield folder
        return
    for below in entries:
        hidden = below.name.startswith(".")
        if depth and not hidden and below.is_dir() and not below.is_symlink():
            yield from _runs_below(below, depth - 1)


def _examine(folder: Path) -> RunHealth:
    config = read_json_object(folder / _CONFIG)
    remember(config)  # a run of an older version, or a config edited since, may hold secrets
    rows = read_rows(folder / _METRICS)
    failure = RunFiles(folder).failure()
    judged = rows if failure is None else [*rows, failure]
    findings = diagnose(Facts.of_config(config), redact(judged))
    return RunHealth(folder, len(rows), tuple(findings))


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """Metrics of the steps in a file, in their order; a step that is there twice counts once.

    Raises:
        RunError: a complete line is not a JSON object with a number as its step.
    """
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    by_step = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no newline follows it: it is still being written
                break
            raise RunError(f"{path}, line {number}, must be JSON: {error}.") from error
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            raise RunError(f"{path}, line {number}, must have a whole number as 'step'.")
        # A resumed run may have written a step twice: the later line replaces the earlier one.
        by_step[step] = row
    return [by_step[step] for step in sorted(by_step)]
