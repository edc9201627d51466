"""Trials of a search for weights, read from its folder: the Optuna study and the runs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from steelyard._extras import cure
from steelyard.errors import RunError
from steelyard.experiment.paired_differences import Estimate, estimate
from steelyard.experiment.run_dir import RunFolder

State: TypeAlias = Literal["completed", "pruned", "failed", "unfinished"]

STUDY = "study.db"
STUDY_NAME = "steelyard"
OBJECTIVES = "objectives"  # attribute of a trial: the objective of each of its runs
SEEDS = "seeds"  # attribute of the study: number of seeds of a trial
_TARGET = 0.25  # importances are for reaching this best part of the trials
_STATES: Mapping[str, State] = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True)
class TrialResult:
    """One trial of a search.

    Attributes:
        number: number of the trial, from 0.
        state: whether it was completed, pruned, failed, or has not ended.
        weights: its weights, by the names of `weight_ranges`.
        objective: its objective, with an interval for several seeds; None unless completed.
        held_out: mean over its seeds of each `held_out/` metric at the last step; empty unless
            completed.
        seconds: time of all of its steps.
        runs: its run folders, one for each seed, that of the first seed first.
    """

    number: int
    state: State
    weights: Mapping[str, float]
    objective: Estimate | None
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


def read_search(folder: Path) -> Search:
    """Read the trials of a search; one that still runs may be read too.

    Raises:
        RunError: the folder holds no search.
        MissingExtraError: Optuna is not installed.
    """
    optuna = import_optuna()
    if not (folder / STUDY).is_file():
        raise RunError(f"{folder} must be the folder of a search, with {STUDY}, and it is none.")
    try:
        study = optuna.load_study(study_name=STUDY_NAME, storage=storage_url(folder))
    except Exception as error:  # SQLAlchemy and Optuna have many; all mean a damaged file
        raise RunError(
            f"{folder / STUDY} must be a study of Optuna, and it is not: {error}."
        ) from error
    trials = [_trial(folder, frozen) for frozen in study.get_trials(deepcopy=False)]
    direction = study.direction.name.lower()
    sign = 1.0 if direction == "minimize" else -1.0
    order = [*_STATES.values(), "unfinished"]
    trials.sort(
        key=lambda trial: (
            order.index(trial.state),
            sign * trial.objective.mean if trial.objective else 0.0,
            trial.number,
        )
    )
    seeds = study.user_attrs.get(SEEDS, 1)
    return Search(folder, direction, seeds, trials, _importances(optuna, study))


def import_optuna() -> Any:
    """Import Optuna, which is an extra, and keep it from logging each trial.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import optuna  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise cure("steelyard tune", error) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def storage_url(folder: Path) -> str:
    """URL of the study in the folder of a search."""
    return f"sqlite:///{folder.resolve() / STUDY}"


def trial_folder(parent: Path, number: int) -> Path:
    """Run folder of a trial; `parent` is the folder of its seed."""
    return parent / f"trial-{number:04d}"


def _trial(folder: Path, frozen: Any) -> TrialResult:
    state = _STATES.get(frozen.state.name, "unfinished")
    parents = sorted(folder.glob("seed-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    paths = [trial_folder(parent, frozen.number) for parent in (folder, *parents)]
    runs = [RunFolder(path) for path in paths if RunFolder(path).holds_run]
    completed = state == "completed"
    return TrialResult(
        number=frozen.number,
        state=state,
        weights=frozen.params,
        objective=_objective(frozen) if completed else None,
        held_out=_held_out(runs) if completed else {},
        seconds=sum(line["seconds"] for run in runs for line in run.metrics()),
        runs=[run.path for run in runs],
    )


def _objective(frozen: Any) -> Estimate | None:
    return estimate(frozen.user_attrs.get(OBJECTIVES, [frozen.value]))


def _held_out(runs: Sequence[RunFolder]) -> dict[str, float]:
    results = [result["metrics"] for run in runs if (result := run.result()) is not None]
    keys = [key for key in results[0] if key.startswith("held_out/")] if results else []
    return {
        key: sum(metrics[key] for metrics in results) / len(results)
        for key in keys
        if all(key in metrics for metrics in results)
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
