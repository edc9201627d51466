"""What leaving out each term did, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steelyard.experiment.report.load import Experiment, LoadedRun


@dataclass(frozen=True)
class Cell:
    """A number of a run, and by how much it differs from that of the run with all terms."""

    value: float | None
    difference: float | None = None


@dataclass(frozen=True)
class AblationTable:
    """Runs as rows, what was measured of them as columns.

    Attributes:
        columns: the headings.
        rows: a run's name and its cells, the run with all terms first.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


def ablation_table(experiment: Experiment) -> AblationTable | None:
    """Losses, every term's value and the time of a step, at the end of each run.

    On held-out data where there are any: those are the same for all runs, and tell of terms that
    were left out too. Otherwise, and for time, means over the last quarter of the steps, since
    single batches differ. None if there is no run with all terms to compare with.
    """
    by_name = {run.name: run for run in experiment.runs}
    full = by_name.get(experiment.full or "")
    if full is None:
        return None
    held_out = bool(full.series("held_out/loss")[0])
    read = _last if held_out else _late
    keys = (
        {"held-out loss": "held_out/loss"} if held_out else {"training loss": "base_loss/value"}
    ) | {name: _value_key(full, name) for name in full.terms}
    measured = {
        run.name: [
            *(read(run, key) for key in keys.values()),
            _late(run, "seconds"),
        ]
        for run in experiment.runs
    }
    order = [full.name, *(name for name in by_name if name != full.name)]
    rows = [(name, _row(name, full.name, measured)) for name in order]
    return AblationTable([*keys, "seconds a step"], rows)


def _value_key(full: LoadedRun, name: str) -> str:
    held_out = f"held_out/regularizers/{name}"
    return held_out if full.series(held_out)[0] else f"regularizers/{name}/value"


def _row(name: str, full: str, measured: Mapping[str, Sequence[float | None]]) -> list[Cell]:
    if name == full:
        return [Cell(value) for value in measured[name]]
    return [
        Cell(value, None if value is None or other is None else value - other)
        for value, other in zip(measured[name], measured[full], strict=True)
    ]


def _last(run: LoadedRun, key: str) -> float | None:
    if not key.startswith("held_out/"):
        return _late(run, key)
    values = run.series(key)[1]
    return values[-1] if values else None


def _late(run: LoadedRun, key: str) -> float | None:
    """The mean over the last quarter of a run's steps."""
    values = run.series(key)[1]
    late = values[-max(1, len(values) // 4) :]
    return sum(late) / len(late) if late else None
