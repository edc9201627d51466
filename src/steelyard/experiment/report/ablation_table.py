"""Table of an ablation: the effect of leaving out each term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steelyard.experiment.report.load import Experiment, LoadedRun


@dataclass(frozen=True)
class Cell:
    """One number of a run, and its difference from the run with all terms."""

    value: float | None
    difference: float | None = None


@dataclass(frozen=True)
class AblationTable:
    """Table with one row per run and one column per measured quantity.

    Attributes:
        columns: headings of the columns, without that of the run's name.
        rows: name and cells of each run, the run with all terms first.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


def ablation_table(experiment: Experiment) -> AblationTable | None:
    """Compare the loss, the value of every term and the time per step at the end of each run.

    Losses and terms are the last ones on held-out data where these were measured: held-out data
    are the same for all runs, and terms are evaluated on them even when they were left out of
    training. Otherwise, and for the time, they are means over the last quarter of the steps, since
    single batches differ.

    Returns:
        The table, or None if there is no run with all terms to compare with.
    """
    by_name = {run.name: run for run in experiment.runs}
    full = by_name.get(experiment.full or "")
    if full is None:
        return None
    has_held_out = bool(full.series("held_out/loss")[0])
    final_value = _final_value if has_held_out else _late_mean
    keys = (
        {"held-out loss": "held_out/loss"} if has_held_out else {"training loss": "base_loss/value"}
    ) | {name: _value_key(full, name) for name in full.terms}
    values = {
        run.name: [
            *(final_value(run, key) for key in keys.values()),
            _late_mean(run, "seconds"),
        ]
        for run in experiment.runs
    }
    order = [full.name, *(name for name in by_name if name != full.name)]
    rows = [(name, _row(name, full.name, values)) for name in order]
    return AblationTable([*keys, "seconds per step"], rows)


def _value_key(full: LoadedRun, name: str) -> str:
    held_out = f"held_out/regularizers/{name}"
    return held_out if full.series(held_out)[0] else f"regularizers/{name}/value"


def _row(name: str, full: str, values: Mapping[str, Sequence[float | None]]) -> list[Cell]:
    if name == full:
        return [Cell(value) for value in values[name]]
    return [
        Cell(value, None if value is None or other is None else value - other)
        for value, other in zip(values[name], values[full], strict=True)
    ]


def _final_value(run: LoadedRun, key: str) -> float | None:
    if not key.startswith("held_out/"):
        return _late_mean(run, key)
    values = run.series(key)[1]
    return values[-1] if values else None


def _late_mean(run: LoadedRun, key: str) -> float | None:
    """Mean over the last quarter of the steps that have this metric."""
    values = run.series(key)[1]
    late = values[-max(1, len(values) // 4) :]
    return sum(late) / len(late) if late else None
