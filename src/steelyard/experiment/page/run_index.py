"""List of the runs in a folder and of their groups, from the first and last line of metrics."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from steelyard.errors import RunError
from steelyard.experiment.compare.search_results import STUDY
from steelyard.experiment.compare.statistics import estimate
from steelyard.experiment.page.formatting import NONE, with_margin
from steelyard.experiment.page.load import ABLATION, METRICS, read_config_file
from steelyard.experiment.page.plain_files import read_first_line, read_last, read_object
from steelyard.experiment.page.run_document import failure
from steelyard.experiment.page.run_statistics import violates
from steelyard.experiment.page.series import parse_row
from steelyard.experiment.run.folder import inode_of, locked_files
from steelyard.output.redaction import redact
from steelyard.output.run_files import are_of_run
from steelyard.output.step_metrics import terms_that_ran
from steelyard.spec.checks import is_finite

_log = logging.getLogger(__name__)

State: TypeAlias = Literal["running", "paused", "stopped", "failed", "done"]
Kind: TypeAlias = Literal["ablation", "search", "seeds"]

_MAX_DEPTH = 4  # seeds of a trial of a search lie two folders below the search
_NO_RUNS = ("checkpoints", "tensorboard", "wandb")
_HELD_OUT = ("held_out/reward", "held_out/loss")
_SHOWN = ("loss_total", "base_loss/value", *_HELD_OUT, "rollouts/reward", "seconds")
_MAIN = {
    "held_out/reward": ("held-out reward", "higher"),
    "held_out/loss": ("held-out loss", "lower"),
    "rollouts/reward": ("reward", "higher"),
    "base_loss/value": ("base loss", "lower"),
    "loss_total": ("loss", "lower"),
}
_GROUPS: Mapping[str, Kind] = {ABLATION: "ablation", STUDY: "search"}
_TRIAL, _SEED = re.compile(r"trial-(\d+)"), re.compile(r"seed-(\d+)")
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
        state: whether a process trains it or waits, it ended before the last step, with an error
            or without, or it is done.
        error: class of the error that it ended with and its first words; None without one.
        began: time of the first step, in seconds since 1970.
        updated: time of the last change of its metrics, or of its config before the first step.
        first: losses, reward and seconds of the first step.
        last: the same of the last step.
        main: what it is judged by: its label, its value, and whether `"lower"` or `"higher"` is
            better; None before the first step.
        bounds: number of bounds that are met at the last step, and of those there are; None
            without bounds.
        branch_of: name of the run that it goes on from; None of a run of its own.
        branch_step: step at which it does.
        group: folder of the ablation or search that it is of, or of several seeds; None outside.
        label: its name there.
        seed: its seed there.
    """

    name: str
    steps: int
    planned: int | None
    state: State
    error: str | None
    began: float | None
    updated: float
    first: dict[str, float]
    last: dict[str, float]
    main: dict[str, Any] | None = None
    bounds: dict[str, int] | None = None
    branch_of: str | None = None
    branch_step: int | None = None
    group: str | None = None
    label: str | None = None
    seed: str | None = None
    # Of the config without its seed: runs with the same one differ in their seed alone.
    digest: str = field(default="", repr=False)


@dataclass(frozen=True)
class RunGroup:
    """Runs that belong together.

    Attributes:
        name: path of their folder below the watched folder; of seeds, the name of their first run.
        kind: what they are of.
        title: name of the folder.
        runs: names of the runs.
        rows: the runs by their label, with means over the seeds: `label`, `runs`, `steps`,
            `held_out` and `base`, texts of the last values with the 95 % interval.
    """

    name: str
    kind: Kind
    title: str
    runs: list[str]
    rows: list[dict[str, Any]]


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
        self._parents: dict[str, tuple[Kind, Path]] = {}  # folders of ablations and searches
        self._labels: dict[str, tuple[_Signature, dict[str, tuple[str, str]]]] = {}
        self._next_scan = 0.0
        self._rows: dict[str, tuple[_Signature, RunSummary]] = {}

    def list(self) -> list[RunSummary]:
        """Summaries of all runs, the one that changed last first."""
        if time.monotonic() >= self._next_scan:
            self._scan()
        locked = locked_files()
        runs = [self._grouped(self._summary(*item, locked)) for item in self._known.items()]
        return sorted(_with_seeds(runs), key=lambda run: (-run.updated, run.name))

    def groups(self, runs: Sequence[RunSummary]) -> Sequence[RunGroup]:
        """Groups of the runs of `list`, that with the run that changed last first."""
        by_group: dict[str, list[RunSummary]] = {}
        for run in runs:
            if run.group is not None:
                by_group.setdefault(run.group, []).append(run)
        return [self._group(name, members) for name, members in by_group.items()]

    def group_path(self, name: str) -> Path | None:
        """Folder of an ablation or a search; None if it is none."""
        self._scan()
        _, path = self._parents.get(name, (None, None))
        return path if path is not None and path.resolve() == path else None

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
        parents: dict[str, tuple[Kind, Path]] = {}
        self._known = dict(self._find(self.folder, _MAX_DEPTH, parents))
        self._parents = parents
        ended = time.monotonic()
        # A folder with many others, such as a whole project, is searched less often.
        self._next_scan = ended + _PAUSE * (ended - began)

    def _find(
        self, folder: Path, depth: int, parents: dict[str, tuple[Kind, Path]]
    ) -> Iterator[tuple[str, Path]]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:  # not readable, or removed since it was found
            return
        files = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        for name, kind in _GROUPS.items():
            if name in files:
                parents[folder.relative_to(self.folder).as_posix()] = kind, folder
        if are_of_run(files):
            yield folder.relative_to(self.folder).as_posix(), folder
        for entry in entries:
            hidden = entry.name.startswith(".") or entry.name in _NO_RUNS
            if depth and not hidden and entry.is_dir(follow_symlinks=False):
                yield from self._find(Path(entry.path), depth - 1, parents)

    def _summary(self, name: str, path: Path, locked: frozenset[int]) -> RunSummary:
        names = (METRICS, "config.json", "result.json", "failure.json", ".lock")
        files = [path / file for file in names]
        signature = tuple(file_signature(file) for file in files)
        known = self._rows.get(name)
        if known is None or known[0] != signature:
            try:
                known = signature, _read_summary(name, path)
            except Exception:  # noqa: BLE001 - a damaged run must not hide the others
                _log.exception("the run %s cannot be summarised", path)
                known = signature, RunSummary(name, 0, None, "stopped", None, None, 0.0, {}, {})
            self._rows[name] = known
        summary = known[1]
        if summary.state == "done":
            return summary
        fresh = max(_FRESH_SECONDS, _FRESH_STEPS * summary.last.get("seconds", 0.0))
        running = inode_of(path / ".lock") in locked or time.time() < summary.updated + fresh
        going: State = "paused" if (path / "paused").is_file() else "running"
        ended: State = "stopped" if summary.error is None else "failed"
        return replace(summary, state=going if running else ended)

    def _grouped(self, run: RunSummary) -> RunSummary:
        parents = [parent.as_posix() for parent in (Path(run.name), *Path(run.name).parents)]
        group = next((name for name in parents[1:] if name in self._parents), None)
        if group is None:
            return run
        kind, folder = self._parents[group]
        below = Path(run.name).relative_to(group).as_posix()
        if kind == "search":
            trial, seed = _TRIAL.search(below), _SEED.search(below)
            label = f"trial {int(trial[1])}" if trial else below
            return replace(run, group=group, label=label, seed=seed[1] if seed else "0")
        label, number = self._ablation_labels(group, folder).get(below, (below, "0"))
        return replace(run, group=group, label=label, seed=number)

    def _ablation_labels(self, group: str, folder: Path) -> dict[str, tuple[str, str]]:
        """Label and seed of each run of an ablation, by its folder below that of the ablation."""
        signature = (file_signature(folder / ABLATION),)
        known = self._labels.get(group)
        if known is None or known[0] != signature:
            content = read_object(folder / ABLATION)
            seeds = content.get("seeds") or {"0": content.get("runs")}
            labels = {
                subfolder: (str(label), str(seed))
                for seed, runs in (seeds.items() if isinstance(seeds, dict) else ())
                for label, subfolder in (runs.items() if isinstance(runs, dict) else ())
                if isinstance(subfolder, str)
            }
            known = self._labels[group] = signature, labels
        return known[1]

    def _group(self, name: str, members: Sequence[RunSummary]) -> RunGroup:
        kind, folder = self._parents.get(name, ("seeds", self._known.get(name, self.folder)))
        by_label: dict[str, list[RunSummary]] = {}
        for run in members:
            by_label.setdefault(run.label or run.name, []).append(run)
        rows = [
            {
                "label": label,
                "runs": [run.name for run in runs],
                "steps": max(run.steps for run in runs),
                "held_out": _mean(runs, *_HELD_OUT),
                "base": _mean(runs, "base_loss/value"),
            }
            for label, runs in by_label.items()
        ]
        return RunGroup(name, kind, folder.name, [run.name for run in members], rows)


def _with_seeds(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Runs with the group of those beside them that differ in their seed alone."""
    twins: dict[tuple[Path, str], list[str]] = {}
    for run in runs:
        if run.group is None and run.digest:
            twins.setdefault((Path(run.name).parent, run.digest), []).append(run.name)
    named = {name: min(names) for names in twins.values() for name in names if len(names) > 1}
    seeds: dict[str, list[str | None]] = {}
    for run in runs:
        if run.name in named:
            seeds.setdefault(named[run.name], []).append(run.seed)
    # Two runs of the same seed are a repetition, and no sample of what seeds do.
    distinct = {name for name, own in seeds.items() if len(set(own)) == len(own)}
    return [
        replace(run, group=named[run.name], label="all seeds")
        if named.get(run.name) in distinct
        else run
        for run in runs
    ]


def _mean(runs: Sequence[RunSummary], *keys: str) -> str:
    for key in keys:
        values = [run.last[key] for run in runs if key in run.last]
        if values:
            return with_margin(estimate(values))
    return NONE


def _read_summary(name: str, path: Path) -> RunSummary:
    config = read_config_file(path)
    first = parse_row(read_first_line(path / METRICS)) or {}
    last = read_last(path / METRICS, parse_row) or {}
    changed = file_signature(path / METRICS) or file_signature(path / "config.json")
    train = config.get("train")
    planned = train.get("steps") if isinstance(train, dict) else None
    seed = train.get("seed") if isinstance(train, dict) else None
    shown = {key: last[key] for key in _SHOWN if is_number(last.get(key))}
    failed = failure(redact(read_object(path / "failure.json")))
    return RunSummary(
        name=name,
        steps=last.get("step", -1) + 1,
        planned=planned if isinstance(planned, int) else None,
        state="done" if file_signature(path / "result.json") else "stopped",
        error=None if failed is None else f"{failed['error']}: {failed['reason']}",
        began=first["time"] if is_number(first.get("time")) else None,
        updated=changed[0] / 1e9 if changed else 0.0,
        first={key: first[key] for key in _SHOWN if is_number(first.get(key))},
        last=shown,
        main=next(
            (
                {"label": label, "value": shown[key], "better": better}
                for key, (label, better) in _MAIN.items()
                if key in shown
            ),
            None,
        ),
        bounds=_bounds(last),
        branch_of=_parent(name, config),
        branch_step=_branch_step(config),
        seed=None if seed is None else str(seed),
        digest=_digest_without_seed(config),
    )


def _bounds(row: Mapping[str, Any]) -> dict[str, int] | None:
    pairs: list[tuple[Any, Any]] = [
        (row.get(f"regularizers/{name}/violation"), row.get(f"regularizers/{name}/bound"))
        for name in terms_that_ran(row)
    ]
    bounded = [(v, bound) for v, bound in pairs if is_number(v) and is_number(bound)]
    met = sum(not violates(violation, bound) for violation, bound in bounded)
    return {"met": met, "of": len(bounded)} if bounded else None


def _parent(name: str, config: Mapping[str, Any]) -> str | None:
    """Name of the run that a run goes on from: its config has it beside its own folder."""
    branch = config.get("branch")
    run = branch.get("run") if isinstance(branch, dict) else None
    return (Path(name).parent / run).as_posix() if isinstance(run, str) else None


def _branch_step(config: Mapping[str, Any]) -> int | None:
    branch = config.get("branch")
    step = branch.get("step") if isinstance(branch, dict) else None
    return step if type(step) is int else None


def _digest_without_seed(config: Mapping[str, Any]) -> str:
    train = config.get("train")
    if not isinstance(train, dict) or "seed" not in train:
        return ""
    rest = {**config, "train": {key: value for key, value in train.items() if key != "seed"}}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def is_number(value: Any) -> bool:
    """Return whether a metric is a number that a finite float can hold."""
    return type(value) in (int, float) and is_finite(value)


def file_signature(file: Path) -> tuple[int, int, int] | None:
    """Time, size and inode of a file, which tell whether it has changed; None if there is none."""
    try:
        status = file.lstat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
