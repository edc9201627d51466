"""Table of an ablation: the effect of leaving out each term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from steelyard.experiment.compare.statistics import (
    LOSS,
    REWARD,
    BySeed,
    Comparison,
    Effects,
    add_verdicts,
    compare,
    conclusions,
    reward_quantity,
)
from steelyard.experiment.page.load import Experiment, LoadedRun
from steelyard.output.step_metrics import weighted_reward

Quantity: TypeAlias = Callable[[LoadedRun], float | None]

_NOT_HELD_OUT = (
    "No data were held out: these are {} and terms in training, and there is no verdict."
)
_TRAINING_LOSS, _TRAINING_REWARD = "training loss", "training reward"


@dataclass(frozen=True)
class AblationTable:
    """Table with one row per run and one column per measured quantity.

    Attributes:
        columns: headings of the columns, without that of the run's name.
        rows: name and cells of each run, the run with all terms first.
        held_out: those of the columns that are measured on held-out data.
        seeds: number of seeds.
        sentences: verdicts, or why there is none.
        rewards: those of the columns in which higher is better; the others are losses and
            penalties, in which lower is better.
        effects: the comparisons of held-out values, by run and quantity, with their verdicts.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Comparison]]]
    held_out: Sequence[str]
    seeds: int
    sentences: Sequence[str]
    rewards: Sequence[str] = ()
    effects: Effects = field(default_factory=dict)


def ablation_table(experiment: Experiment) -> AblationTable | None:
    """Compare loss or reward, the value of every term and the time per step, at the end of runs.

    Losses, rewards and terms are the last ones on held-out data where these were measured:
    held-out data are the same for all runs, and terms and rewards are evaluated on them even when
    they were left out of training. Otherwise, and for the time, they are means over the last
    quarter of the steps, since single batches differ. The sum of the rewards has the weights of
    the run with all terms in every run. Differences from that run are paired by seed.

    Returns:
        The table, or None if there is no run with all terms to compare with.
    """
    by_name = {run.name: run for run in experiment.runs}
    full = by_name.get(experiment.full or "")
    if full is None:
        return None
    held_out, main = _held_out_quantities(full), _main_quantities(full)
    columns: dict[str, Quantity] = {
        **main,
        **{name: partial(_final_value, key=_value_key(full, name)) for name in full.terms},
        "seconds per step": partial(_final_value, key="seconds"),
    }
    rows = {
        name: {
            column: compare(
                _by_seed(experiment, name, quantity),
                None if name == full.name else _by_seed(experiment, full.name, quantity),
            )
            for column, quantity in columns.items()
        }
        for name in [full.name, *(name for name in by_name if name != full.name)]
    }
    has_held_out = held_out[:1] in ([LOSS], [REWARD])
    effects = add_verdicts(
        {name: {column: own[column] for column in held_out} for name, own in rows.items()}
    )
    if has_held_out:
        rows = {name: own | effects[name] for name, own in rows.items()}
    not_held_out = _NOT_HELD_OUT.format("rewards" if full.rewards else "losses")
    return AblationTable(
        columns=list(columns),
        rows=[(name, list(own.values())) for name, own in rows.items()],
        held_out=held_out,
        seeds=len(experiment.seeds) or 1,
        sentences=conclusions(effects) if has_held_out else [not_held_out],
        rewards=list(main) if full.rewards else [],
        effects=effects if has_held_out else {},
    )


def _main_quantities(full: LoadedRun) -> dict[str, Quantity]:
    """Loss of runs with fixed data; of on-policy runs the sum of the rewards, and each of them."""
    if not full.rewards:
        if full.series("held_out/loss")[0]:
            return {LOSS: partial(_final_value, key="held_out/loss")}
        return {_TRAINING_LOSS: partial(_final_value, key="base_loss/value")}
    key, main = "rewards/{}/mean", _TRAINING_REWARD
    if full.series("held_out/reward")[0]:
        key, main = "held_out/rewards/{}", REWARD
    weights = {name: full.series(f"rewards/{name}/weight")[1][-1] for name in full.rewards}

    def total(run: LoadedRun) -> float | None:
        means = {key.format(name): _final_value(run, key.format(name)) for name in weights}
        return weighted_reward(means, weights, key)

    by_reward = {
        reward_quantity(name): partial(_final_value, key=key.format(name)) for name in full.rewards
    }
    return {main: total, **by_reward}


def _held_out_quantities(full: LoadedRun) -> list[str]:
    """Columns that are measured on held-out data."""
    rewards = [n for n in full.rewards if full.series(f"held_out/rewards/{n}")[0]]
    terms = [n for n in full.terms if _value_key(full, n).startswith("held_out/")]
    main = [
        quantity
        for quantity, key in ((LOSS, "held_out/loss"), (REWARD, "held_out/reward"))
        if full.series(key)[0]
    ]
    return [*main, *map(reward_quantity, rewards), *terms]


def _by_seed(experiment: Experiment, name: str, quantity: Quantity) -> BySeed:
    """Final value of a quantity in the runs with a name, by seed."""
    seeds = experiment.seeds or {"0": experiment.runs}
    runs = {seed: run for seed, runs in seeds.items() for run in runs if run.name == name}
    return {seed: quantity(run) for seed, run in runs.items()}


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
