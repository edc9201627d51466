"""Trials of a search for weights, read from its folder: the Optuna study and the runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from steelyard._extras import load
from steelyard.errors import RunError
from steelyard.experiment.compare.statistics import Comparison, Estimate, compare
from steelyard.experiment.run.folder import RunFolder
from steelyard.spec.checks import is_finite

TrialStatus: TypeAlias = Literal["completed", "pruned", "failed", "unfinished"]

STUDY = "study.db"
STUDY_NAME = "steelyard"
OBJECTIVES = "objectives"  # attribute of a trial: the objective of each of its runs
SEEDS = "seeds"  # attribute of the study: number of seeds of a trial
CONFIG = "config"  # attribute of the study: the config that it began with, without secrets
REWARDS = "rewards."  # begins the name of the weight of a reward
_TARGET = 0.25  # importances are for reaching this best part of the trials
_STATES: Mapping[str, TrialStatus] = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True)
class TrialResult:
    """One trial of a search.

    Attributes:
        number: number of the trial, from 0.
        state: whether it was completed, pruned, failed, or has not ended.
        weights: its weights, by the names of `weight_ranges`.
        objective: its objective, with an interval for several seeds; None unless completed.
        behind: how much larger its objective is than that of the best trial, paired by seed;
            None unless completed, and for the best trial.
        held_out: mean over its seeds of each `held_out/` metric at the last step; empty unless
            completed.
        seconds: time of all of its steps.
        runs: its run folders, one for each seed, that of the first seed first.
    """

    number: int
    state: TrialStatus
    weights: Mapping[str, float]
    objective: Estimate | None
    behind: Estimate | None
    held_out: Mapping[str, float]
    seconds: float
    runs: Sequence[Path]


@dataclass(frozen=True)
class Search:
    """All trials of a search.

    Attributes:
        folder: folder of the search.
        direction: `"minimize"` or `"maximize"`.
        seeds: number of runs of each trial.
        trials: the trials: completed ones first, the best of them first.
        importances: importance of each weight for reaching the best quarter of the trials, by
            PED-ANOVA; they sum to 1. Empty with fewer than two completed trials, or one weight.
    """

    folder: Path
    direction: str
    seeds: int
    trials: Sequence[TrialResult]
    importances: Mapping[str, float]

    @property
    def completed(self) -> list[TrialResult]:
        """Trials that were completed, the best first."""
        return [trial for trial in self.trials if trial.state == "completed"]

    @property
    def on_policy(self) -> bool:
        """Return whether its runs train on answers, and have held-out rewards instead of losses."""
        return any("held_out/reward" in trial.held_out for trial in self.trials)

    @property
    def tunes_rewards(self) -> bool:
        """Return whether trials differ in weights of rewards, so that their sums do not compare."""
        return any(name.startswith(REWARDS) for trial in self.trials for name in trial.weights)


def read_search(folder: Path) -> Search:
    """Read the trials of a search; one that still runs may be read too.

    Raises:
        RunError: the folder holds no search.
        MissingExtraError: Optuna is not installed.
    """
    optuna = import_optuna()
    if not (folder / STUDY).is_file():
        raise RunError(f"{folder} must be the folder of a search, with {STUDY}, and it is none.")
    with convert_study_errors(folder):
        study = optuna.load_study(study_name=STUDY_NAME, storage=storage_url(folder))
    direction = study.direction.name.lower()
    sign = 1.0 if direction == "minimize" else -1.0
    order = [*_STATES.values(), "unfinished"]

    def rank(frozen: Any) -> tuple[int, float, int]:
        state = _state(frozen)
        return (
            order.index(state),
            sign * frozen.value if state == "completed" else 0.0,
            frozen.number,
        )

    ranked = sorted(study.get_trials(deepcopy=False), key=rank)
    trials = [_trial(folder, frozen, ranked[0]) for frozen in ranked]
    seeds = study.user_attrs.get(SEEDS, 1)
    return Search(folder, direction, seeds, trials, _importances(optuna, study))


def import_optuna() -> Any:
    """Import Optuna, which is an extra, and keep it from logging each trial.

    Raises:
        MissingExtraError: it is not installed.
    """
    optuna: Any = load("optuna", "steelyard tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextlib.contextmanager
def convert_study_errors(folder: Path) -> Iterator[None]:
    """Raise an error of the file of a study as a `RunError`."""
    try:
        yield
    except Exception as error:  # SQLAlchemy and Optuna have many; all mean a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RunError(
            f"{folder / STUDY} must be a study of Optuna, and it is not: {reason}."
        ) from error


def storage_url(folder: Path) -> str:
    """URL of the study in the folder of a search."""
    return f"sqlite:///{folder.resolve() / STUDY}"


def trial_folder(parent: Path, number: int) -> Path:
    """Run folder of a trial; `parent` is the folder of its seed."""
    return parent / f"trial-{number:04d}"


def _state(frozen: Any) -> TrialStatus:
    return _STATES.get(frozen.state.name, "unfinished")


def _trial(folder: Path, frozen: Any, best: Any) -> TrialResult:
    state = _state(frozen)
    parents = sorted(folder.glob("seed-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    paths = [trial_folder(parent, frozen.number) for parent in (folder, *parents)]
    runs = [RunFolder(path) for path in paths if RunFolder(path).holds_run]
    compared = Comparison(None)
    if state == "completed":
        compared = compare(_objectives(frozen), None if frozen is best else _objectives(best))
    return TrialResult(
        number=frozen.number,
        state=state,
        weights=frozen.params,
        objective=compared.value,
        behind=compared.difference,
        held_out=_held_out(runs) if state == "completed" else {},
        seconds=sum(line["seconds"] for run in runs for line in run.metrics()),
        runs=[run.path for run in runs],
    )


def _objectives(frozen: Any) -> dict[int, float]:
    """Objective of each run of a trial, in the order of the seeds."""
    return dict(enumerate(frozen.user_attrs.get(OBJECTIVES, [frozen.value])))


def _held_out(runs: Sequence[RunFolder]) -> dict[str, float]:
    results = [result["metrics"] for run in runs if (result := run.result()) is not None]
    keys = [key for key in results[0] if key.startswith("held_out/")] if results else []
    return {
        key: sum(metrics[key] for metrics in results) / len(results)
        for key in keys
        if all(is_finite(metrics.get(key)) for metrics in results)  # not the reason of a failure
    }


def _importances(optuna: Any, study: Any) -> dict[str, float]:
    completed = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(completed) < 2 or len(completed[0].params) < 2:  # noqa: PLR2004 - nothing to compare
        return {}
    # Not fANOVA, Optuna's default: it needs scikit-learn.
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=_TARGET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator is experimental
        importances: dict[str, float] = optuna.importance.get_param_importances(
            study, evaluator=evaluator
        )
    return importances
