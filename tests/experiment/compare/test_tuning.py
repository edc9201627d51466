"""Search for weights with Optuna."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import optuna
import pytest

from steelyard.errors import ConfigError, RunError
from steelyard.experiment import RunFolder, read_config, tune
from steelyard.experiment.compare.tuning import objective
from steelyard.experiment.config.schema import TuneConfig
from steelyard.experiment.config.weights import weight_ranges, with_weights
from tests.experiment.small_runs import (
    DRIFT,
    KL,
    L2,
    Recorder,
    brief,
    failing,
    letters,
    reward,
    small_config,
    small_rollouts,
    term,
)

RANGE = {**L2, "weight": {"tune": [0.1, 10.0], "log": True}}


def test_ranges_are_named_after_their_terms(folder: Path) -> None:
    unnamed = {"use": "entropy", "weight": {"tune": [0, 1]}}
    config = small_config(folder, regularizers=[RANGE, DRIFT, unnamed])
    assert weight_ranges(config) == {
        "l2": {"tune": [0.1, 10.0], "log": True},
        "entropy#3": {"tune": [0, 1]},
    }
    fixed = with_weights(config, {"l2": 0.5, "entropy#3": 0.25})
    assert [entry.weight for entry in fixed.regularizers] == [0.5, 0.1, 0.25]
    assert weight_ranges(fixed) == {}


def test_ranges_of_rewards_are_named_apart_from_those_of_terms(folder: Path) -> None:
    span = {"tune": [0.1, 10.0]}
    entries = [reward(letters, name="l2", weight=span), reward(brief, weight=span)]
    config = small_rollouts(folder, rewards=entries, regularizers=[RANGE, KL])
    unnamed = f"rewards.{entries[1]['use']}#2"
    assert list(weight_ranges(config)) == ["l2", "rewards.l2", unnamed]
    fixed = with_weights(config, {"l2": 0.5, "rewards.l2": 2.0, unnamed: 3.0})
    assert [entry.weight for entry in fixed.regularizers] == [0.5, 0.1]
    assert [entry.weight for entry in fixed.rewards] == [2.0, 3.0]
    assert weight_ranges(fixed) == {}


def test_ranges_of_the_same_name_are_refused(folder: Path) -> None:
    entries = [reward(letters, name="l2", weight={"tune": [0.1, 10.0]})]
    confusing = {**RANGE, "name": "rewards.l2"}
    config = small_rollouts(folder, rewards=entries, regularizers=[confusing])
    with pytest.raises(ConfigError, match=r"must be unique, got \['rewards\.l2', 'rewards\.l2'\]"):
        weight_ranges(config)


def test_a_search_over_rewards_needs_an_objective_that_does_not_depend_on_their_weights(
    folder: Path,
) -> None:
    entries = [reward(letters), reward(brief, name="brief", weight={"tune": [0.1, 10.0]})]
    config = small_rollouts(folder, rewards=entries)
    message = r"objective must not be 'held_out/reward' where the weight of a reward is tuned "
    with pytest.raises(ConfigError, match=message + r"\(rewards\.brief\)"):
        tune(config, folder / "t")


def test_the_weight_of_a_reward_is_searched_by_rewards_as_they_are(folder: Path) -> None:
    entries = [reward(letters), reward(brief, name="brief", weight={"tune": [0.1, 10.0]})]
    keys = '{"held_out/rewards/letters" = 1.0, "held_out/rewards/brief" = 2.0}'
    config = small_rollouts(
        folder, "train.steps=2", "tune.trials=2", f"tune.objective={keys}", rewards=entries
    )
    assert config.tune.direction == "maximize"
    tuned = tune(config, folder / "t")
    values = []
    for number in range(2):
        run = RunFolder(folder / "t" / f"trial-{number:04d}")
        (weight,) = [each.weight for each in run.config().rewards if each.name == "brief"]
        last = run.metrics()[-1]
        assert last["rewards/brief/weight"] == weight
        values.append(
            last["held_out/rewards/letters"] + 2 * last["held_out/rewards/brief"],
        )
        if values[-1] == max(values):
            best = weight
    assert tuned.value == pytest.approx(max(values))
    assert tuned.weights == {"rewards.brief": best}
    assert [each["weight"] for each in json.loads(tuned.config.read_text())["rewards"]] == [1, best]


def test_the_objective_is_a_metric_or_a_weighted_sum() -> None:
    metrics = {"held_out/loss": 2.0, "nll": 3.0, "loss_total": 5.0}
    assert objective(TuneConfig(), metrics) == 2.0
    weighted = TuneConfig(objective={"held_out/loss": 1.0, "nll": -0.5})
    assert objective(weighted, metrics) == 0.5
    with pytest.raises(
        ConfigError, match=r"^\[tune\]: objective must be .*, got 'x'; known: held_"
    ):
        objective(TuneConfig(objective={"nll": 1.0, "x": 1.0}), metrics)


def test_a_config_without_a_range_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"weight must be \{ tune = \[low, high\] \} for at least"
    ):
        tune(small_config(folder), folder / "t")


def run_trials(folder: Path, trials: int, *overrides: str, **options: Any) -> Any:
    entries = options.pop("regularizers", [RANGE])
    config = small_config(folder, f"tune.trials={trials}", *overrides, regularizers=entries)
    return tune(config, folder / "t", **options)


def test_a_search_returns_the_best_trial_and_continues(folder: Path) -> None:
    first = run_trials(folder, 1)
    assert (first.trials, first.done) == (1, True)
    recorder = Recorder()
    found = run_trials(folder, 3, "tune.prune=false", watch=recorder)
    assert (found.trials, found.done) == (3, True)
    assert not [text for text in recorder.messages if text.startswith("trial 0")]
    runs = [RunFolder(folder / "t" / f"trial-{number:04d}") for number in range(3)]
    results = [run.result() for run in runs]
    losses = [result["metrics"]["held_out/loss"] for result in results if result is not None]
    assert len(losses) == 3
    assert found.value == min(losses)
    best = runs[losses.index(min(losses))].config().regularizers[0].weight
    assert found.weights == {"l2": best}
    assert 0.1 <= best <= 10
    assert read_config(found.config).regularizers[0].weight == best


def test_a_continued_search_has_the_trials_of_an_uninterrupted_one(folder: Path) -> None:
    def weights_of(name: str) -> list[float]:
        runs = sorted((folder / name).glob("trial-*"))
        return [RunFolder(run).config().regularizers[0].weight for run in runs]

    def search(name: str, trials: int, **options: Any) -> None:
        overrides = (f"tune.trials={trials}", "tune.prune=false", "train.steps=2")
        tune(small_config(folder, *overrides, regularizers=[RANGE]), folder / name, **options)

    search("whole", 13)
    assert len(set(weights_of("whole"))) == 13
    search("parts", 3)
    calls = itertools.count()
    search("parts", 13, stop=lambda: next(calls) >= 2)  # in the middle of the fourth trial
    search("parts", 11)  # the first that follow the ten random ones
    search("parts", 13)
    assert weights_of("parts") == weights_of("whole")


def test_the_objective_of_a_trial_is_the_mean_over_its_seeds(folder: Path) -> None:
    recorder = Recorder()
    overrides = ("tune.prune=false", "train.steps=2")
    found = run_trials(folder, 2, *overrides, seeds=2, watch=recorder)
    assert found.done
    assert recorder.counts == [(step, 8) for step in range(8)]
    best = found.search.trials[0]
    assert best.runs == [
        folder / "t" / f"trial-000{best.number}",
        folder / "t" / "seed-1" / f"trial-000{best.number}",
    ]
    configs = [RunFolder(run).config() for run in best.runs]
    assert [config.train.seed for config in configs] == [0, 1]
    assert [config.regularizers[0].weight for config in configs] == [found.weights["l2"]] * 2
    losses = [RunFolder(run).metrics()[-1]["held_out/loss"] for run in best.runs]
    assert found.value == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert best.objective is not None
    assert best.objective.margin == pytest.approx(12.7062 * abs(losses[0] - losses[1]) / 2, 1e-4)
    assert "trial 0, seed 1" in recorder.messages
    assert any(" ± " in text for text in recorder.messages)


def test_a_trial_interrupted_between_its_seeds_is_resumed(folder: Path) -> None:
    overrides = ("tune.prune=false", "train.steps=1")
    answers = iter([False, False])  # before the trial, and before the step of its first run
    stopped = run_trials(folder, 1, *overrides, seeds=2, stop=lambda: next(answers, True))
    assert (stopped.trials, stopped.done) == (0, False)
    assert [trial.state for trial in stopped.search.trials] == ["unfinished"]
    recorder = Recorder()
    found = run_trials(folder, 1, *overrides, seeds=2, watch=recorder)
    assert found.done
    assert len(recorder.steps) == 1, "the run of the first seed is not repeated"
    assert recorder.counts == [(1, 2)]


def test_a_search_keeps_its_number_of_seeds(folder: Path) -> None:
    run_trials(folder, 1, "train.steps=1")
    with pytest.raises(RunError, match=r"searched with as many seeds as before, 1, got 2: means"):
        run_trials(folder, 2, "train.steps=1", seeds=2)
    with pytest.raises(ConfigError, match=r"^seeds must be a whole number >= 1, got 0"):
        run_trials(folder, 2, seeds=0)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("tune.direction=maximize", "tune.direction"),
        ('tune.objective="base_loss/value"', "tune.objective"),
        ("train.learning_rate=0.5", "train.learning_rate"),
        (
            "regularizers.l2.weight={ tune = [0.2, 10.0], log = true }",
            "regularizers.0.weight.tune.0",
        ),
    ],
)
def test_a_search_keeps_its_config(folder: Path, override: str, key: str) -> None:
    """Otherwise trials of different configs would be compared, in the first one's direction."""
    run_trials(folder, 1, "train.steps=1")
    rule = f"must be searched with the config that it began with, and {key} is another: "
    with pytest.raises(RunError, match=re.escape(rule)):
        run_trials(folder, 2, "train.steps=1", override)
    assert run_trials(folder, 1, "train.steps=1").trials == 1


def test_runs_of_another_config_are_not_taken_for_those_of_a_trial(folder: Path) -> None:
    run_trials(folder, 1, "train.steps=1")
    (folder / "t" / "study.db").unlink()
    with pytest.raises(RunError, match=r"trial-0000 must be new or hold a run of this config"):
        run_trials(folder, 1, "train.steps=2")


def test_a_damaged_study_is_an_error_that_names_it(folder: Path) -> None:
    (folder / "t").mkdir()
    (folder / "t" / "study.db").write_text("not a database")
    with pytest.raises(RunError, match=r"study\.db must be a study of Optuna, .*[^\n]+\.$"):
        run_trials(folder, 1)


def test_an_unknown_objective_is_an_error_after_the_first_step(folder: Path) -> None:
    recorder = Recorder()
    with pytest.raises(ConfigError, match=r"objective must be made of keys .*, got 'gone'; known"):
        run_trials(folder, 1, "tune.objective=gone", watch=recorder)
    assert [metrics["step"] for metrics in recorder.steps] == [0]


def test_a_held_out_objective_needs_held_out_data(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\[tune\]: objective .*, and data.held_out is 0: hold"):
        run_trials(folder, 1, "data.held_out=0.0")
    assert not (folder / "t").exists(), "nothing is trained first"
    found = run_trials(folder, 1, "data.held_out=0.0", 'tune.objective="base_loss/value"')
    assert found.value is not None


def test_trials_are_evaluated_five_times_unless_the_config_says_how_often(folder: Path) -> None:
    run_trials(folder, 1, "train.steps=10")
    run = RunFolder(folder / "t" / "trial-0000")
    assert run.config().train.evaluate_every == 2
    assert [m["step"] for m in run.metrics() if "held_out/loss" in m] == [0, 2, 4, 6, 8, 9]


def test_an_interrupted_trial_is_resumed(folder: Path) -> None:
    answers = iter([False, False, False])  # before the trial, and before its first two steps
    stopped = run_trials(folder, 1, stop=lambda: next(answers, True))
    assert (stopped.trials, stopped.weights, stopped.value, stopped.done) == (0, {}, None, False)
    assert not stopped.config.exists()
    recorder = Recorder()
    found = run_trials(folder, 1, watch=recorder)
    assert (found.trials, found.done) == (1, True)
    assert [metrics["step"] for metrics in recorder.steps] == [2]


def test_the_base_model_is_run_once_for_all_trials(folder: Path) -> None:
    recorder = Recorder()
    entries = [{**KL, "weight": RANGE["weight"]}]
    run_trials(folder, 2, "train.steps=1", regularizers=entries, watch=recorder)
    assert recorder.messages.count("computing the base model's log-probs") == 1


def test_a_trial_whose_term_fails_counts_as_ended(folder: Path) -> None:
    recorder = Recorder()
    found = run_trials(folder, 1, watch=recorder, regularizers=[RANGE, term(failing)])
    assert (found.trials, found.weights, found.done) == (1, {}, True)
    assert any(text.startswith("trial 0 failed: ") for text in recorder.messages)


def test_a_trial_that_is_worse_than_the_median_is_pruned(folder: Path) -> None:
    entries = [RANGE]
    config = small_config(folder, "train.steps=10", "tune.trials=4", regularizers=entries)
    # Three trials that were better at every step than any model can be.
    (folder / "t").mkdir()
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 't' / 'study.db'}", study_name="steelyard"
    )
    for _ in range(3):
        trial = study.ask()
        trial.suggest_float("l2", 0.1, 10.0, log=True)
        for step in range(10):
            trial.report(-1.0, step)
        study.tell(trial, -1.0)
    recorder = Recorder()
    found = tune(config, folder / "t", watch=recorder)
    assert found.trials == 4
    assert study.trials[3].state == optuna.trial.TrialState.PRUNED
    assert "trial 3 pruned after step 3" in recorder.messages
    states = [(trial.number, trial.state) for trial in found.search.trials]
    assert states == [(0, "completed"), (1, "completed"), (2, "completed"), (3, "pruned")]
    assert len(recorder.steps) == 3, "the first evaluation after the warm-up is at step 2"
    assert json.loads(found.config.read_text())["regularizers"][0]["weight"] == found.weights["l2"]


def test_several_trials_at_once_need_a_cluster(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"got jobs=2: give a Ray cluster, with --ray auto"):
        tune(small_config(folder, regularizers=[RANGE]), folder / "s", jobs=2)
