"""Table of an ablation: the effect of leaving out each term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.experiment.paired_differences import LOSS, BySeed, Comparison, compare, conclusions
from steelyard.experiment.report.load import Experiment, LoadedRun

NOT_HELD_OUT = (
    "No data were held out: these are losses and terms in training, and there is no verdict."
)


@dataclass(frozen=True)
class AblationTable:
    """Table with one row per run and one column per measured quantity.

    Attributes:
        columns: headings of the columns, without that of the run's name.
        rows: name and cells of each run, the run with all terms first.
        held_out: those of the columns that are measured on held-out data.
        seeds: number of seeds.
        sentences: verdicts, or why there is none.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Comparison]]]
    held_out: Sequence[str]
    seeds: int
    sentences: Sequence[str]


def ablation_table(experiment: Experiment) -> AblationTable | None:
    """Compare the loss, the value of every term and the time per step at the end of each run.

    Losses and terms are the last ones on held-out data where these were measured: held-out data
    are the same for all runs, and terms are evaluated on them even when they were left out of
    training. Otherwise, and for the time, they are means over the last quarter of the steps, since
    single batches differ. Differences from the run with all terms are paired by seed.

    Returns:
        The table, or None if there is no run with all terms to compare with.
    """
    by_name = {run.name: run for run in experiment.runs}
    full = by_name.get(experiment.full or "")
    if full is None:
        return None
    has_held_out = bool(full.series("held_out/loss")[0])
    loss = {LOSS: "held_out/loss"} if has_held_out else {"training loss": "base_loss/value"}
    keys = {
        **loss,
        **{name: _value_key(full, name) for name in full.terms},
        "seconds per step": "seconds",
    }
    rows = {
        name: {
            column: compare(
                _by_seed(experiment, name, key),
                None if name == full.name else _by_seed(experiment, full.name, key),
            )
            for column, key in keys.items()
        }
        for name in [full.name, *(name for name in by_name if name != full.name)]
    }
    held_out = [column for column, key in keys.items() if key.startswith("held_out/")]
    effects = {name: {column: own[column] for column in held_out} for name, own in rows.items()}
    return AblationTable(
        columns=list(keys),
        rows=[(name, list(own.values())) for name, own in rows.items()],
        held_out=held_out,
        seeds=len(experiment.seeds) or 1,
        sentences=conclusions(effects) if has_held_out else [NOT_HELD_OUT],
    )


def _by_seed(experiment: Experiment, name: str, key: str) -> BySeed:
    """Final value of a metric in the runs with a name, by seed."""
    seeds = experiment.seeds or {"0": experiment.runs}
    runs = {seed: run for seed, runs in seeds.items() for run in runs if run.name == name}
    return {seed: _final_value(run, key) for seed, run in runs.items()}


def _value_key(full: LoadedRun, name: str) -> str:
    held_out = f"held_out/regularizers/{name}"
    return held_out if full.series(held_out)[0] else f"regularizers/{name}/value"


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
