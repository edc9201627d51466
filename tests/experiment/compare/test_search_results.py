"""Trials of a search, read from its folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import optuna
import pytest

from steelyard.errors import RunError
from steelyard.experiment import RunFolder, tune
from steelyard.experiment.compare.search_results import read_search, storage_url
from tests.experiment.small_runs import L2, failing, small_config, term


def write_study(folder: Path, direction: Any = "minimize") -> optuna.Study:
    folder.mkdir(exist_ok=True)
    return optuna.create_study(
        storage=storage_url(folder), study_name="steelyard", direction=direction
    )


def test_trials_are_those_of_the_study_and_of_its_runs(folder: Path) -> None:
    ranges = [{**L2, "weight": {"tune": [0.1, 10.0]}}]
    config = small_config(folder, "tune.trials=2", "tune.prune=false", regularizers=ranges)
    found = tune(config, folder / "t")
    search = read_search(folder / "t")
    assert search == found.search
    assert (search.direction, search.seeds, search.importances) == ("minimize", 1, {})
    assert len(search.completed) == 2
    for trial in search.trials:
        run = RunFolder(folder / "t" / f"trial-000{trial.number}")
        assert trial.runs == [run.path]
        assert trial.weights == {"l2": run.config().regularizers[0].weight}
        last = run.metrics()[-1]
        assert trial.held_out == {
            key: last[key] for key in ("held_out/loss", "held_out/regularizers/l2")
        }
        assert trial.objective is not None
        assert (trial.objective.mean, trial.objective.margin) == (last["held_out/loss"], None)
        assert trial.seconds == pytest.approx(sum(line["seconds"] for line in run.metrics()))
    values = [trial.objective.mean for trial in search.trials if trial.objective]
    assert values == sorted(values)


def test_a_failed_trial_has_no_objective(folder: Path) -> None:
    ranges = [{**L2, "weight": {"tune": [0.1, 10.0]}}, term(failing)]
    config = small_config(folder, "tune.trials=1", regularizers=ranges)
    (trial,) = tune(config, folder / "t").search.trials
    assert (trial.state, trial.objective, trial.held_out) == ("failed", None, {})


@pytest.mark.parametrize(("direction", "order"), [("minimize", [1, 0, 2]), ("maximize", [0, 1, 2])])
def test_the_best_trial_comes_first(folder: Path, direction: str, order: list[int]) -> None:
    study = write_study(folder, direction)
    for value in (2.0, 1.0, None):
        trial = study.ask()
        trial.suggest_float("kl", 0.0, 1.0)
        if value is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, value)
    study.ask()
    search = read_search(folder)
    assert [trial.number for trial in search.trials] == [*order, 3]
    assert [trial.state for trial in search.trials[2:]] == ["pruned", "unfinished"]
    assert search.seeds == 1, "a study of an older version has no number of seeds"


def test_trials_are_compared_with_the_best_by_seed(folder: Path) -> None:
    study = write_study(folder)
    for values in ([1.5, 5.51, 9.49], [1.0, 5.0, 9.0]):
        trial = study.ask()
        trial.set_user_attr("objectives", values)
        study.tell(trial, sum(values) / 3)
    best, other = read_search(folder).trials
    assert best.behind is None
    assert other.objective is not None
    assert other.objective.margin == pytest.approx(9.92, abs=0.01)
    assert other.behind is not None
    assert (other.behind.mean, other.behind.margin) == pytest.approx((0.5, 0.02484), rel=1e-3)


def test_importances_tell_the_weight_that_matters(folder: Path) -> None:
    study = write_study(folder)
    generator = random.Random(0)
    for _ in range(40):
        trial = study.ask({
            "kl": optuna.distributions.FloatDistribution(0.0, 1.0),
            "l2": optuna.distributions.FloatDistribution(0.0, 1.0),
        })  # fmt: skip
        study.tell(trial, (trial.params["kl"] - 0.3) ** 2 + 1e-4 * generator.random())
    importances = read_search(folder).importances
    assert sum(importances.values()) == pytest.approx(1.0)
    assert importances["kl"] > 0.8


def test_a_folder_without_a_search_is_refused(folder: Path) -> None:
    with pytest.raises(RunError, match=r"must be the folder of a search, with study\.db, and it"):
        read_search(folder)
    (folder / "study.db").write_text("not a database")
    with pytest.raises(RunError, match=r"study\.db must be a study of Optuna, and it is not: "):
        read_search(folder)
