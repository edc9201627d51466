"""The report of a search: trials, importances, and base loss against each term."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import RunError
from steelyard.experiment import tune
from steelyard.experiment.report import write_report
from steelyard.experiment.report.formatting import number
from steelyard.experiment.report.search_charts import non_dominated
from steelyard.experiment.search import read_search, storage_url
from tests.experiment.small_runs import L2, brief, letters, reward, small_config, small_rollouts

from .parsed_page import page_charts, text_of, trace_points

RANGES: list[dict[str, Any]] = [
    {**L2, "weight": {"tune": [0.1, 10.0], "log": True}},
    {"use": "l1", "name": "l1", "weight": {"tune": [0.0, 1.0]}},
]


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    """Folder of a search of four trials with two seeds each."""
    overrides = ("tune.trials=4", "train.steps=1", "tune.prune=false")
    config = small_config(tmp_path, *overrides, regularizers=RANGES)
    tune(config, tmp_path / "search", seeds=2)
    return tmp_path / "search"


def test_the_report_shows_trials_importances_pareto_and_the_best_config(searched: Path) -> None:
    search = read_search(searched)
    page = write_report([searched], searched / "report.html")
    text, charts = text_of(page), page_charts(page)
    best = search.trials[0]
    assert "Search: search" in text
    assert f"4 trials: 4 completed. The best is trial {best.number}, with l2 = " in text
    assert "objectives are means of 2 seeds" in text
    for trial in search.trials:
        assert trial.objective is not None
        assert f"{trial.number} {trial.objective.mean:.3f} ±" in text
    assert "They mean little for 4 completed trials" in text
    assert charts["importances"]["data"][0]["x"] == list(search.importances)
    assert "steelyard train" in text
    assert f"{best.weights['l1']:.4f}"[:5] in text, "the best config"
    losses = [trial.held_out["held_out/loss"] for trial in search.trials]
    values = [trial.held_out["held_out/regularizers/l2"] for trial in search.trials]
    front = non_dominated(list(zip(losses, values, strict=True)))
    drawn = next(c for key, c in charts.items() if key == "pareto-0")
    kept = {trial.number for trial, each in zip(search.trials, front, strict=True) if each}
    assert {int(number) for number in drawn["data"][0]["text"]} == kept
    assert sorted(x for trace in drawn["data"] for x in trace["x"]) == sorted(losses)
    assert trace_points(drawn)


def test_a_search_without_a_completed_trial_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    study = optuna.create_study(storage=storage_url(tmp_path / "t"), study_name="steelyard")
    with pytest.raises(RunError, match=r"t must have a completed trial for a report, got no trial"):
        write_report([tmp_path / "t"], tmp_path / "report.html")
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    with pytest.raises(RunError, match=r", got 1 failed: continue the search, or read log\.txt"):
        write_report([tmp_path / "t"], tmp_path / "report.html")
    with pytest.raises(RunError, match=r"t is a search, and has a report of its own: give its"):
        write_report([tmp_path / "t", tmp_path / "other"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_the_front_dominates_every_other_point(points: list[tuple[float, float]]) -> None:
    front = [point for point, kept in zip(points, non_dominated(points), strict=True) if kept]
    for point in points:
        assert any(a <= point[0] and b <= point[1] for a, b in front)
    for point in front:
        assert not any((a, b) != point and a <= point[0] and b <= point[1] for a, b in points)


def test_a_search_of_on_policy_runs_is_reported_by_rewards(tmp_path: Path) -> None:
    overrides = ("tune.trials=3", "train.steps=1", "tune.prune=false")
    config = small_rollouts(tmp_path, *overrides, regularizers=RANGES[:1])
    tune(config, tmp_path / "search")
    search = read_search(tmp_path / "search")
    page = write_report([tmp_path / "search"], tmp_path / "report.html")
    text, charts = text_of(page), page_charts(page)
    rewards = [trial.held_out["held_out/reward"] for trial in search.trials]
    assert rewards == sorted(rewards, reverse=True), "the best first"
    assert f": held_out/reward {number(rewards[0])}, the highest." in text
    assert "Reward against each term" in text
    assert "a higher reward and a lower value are better" in text
    assert "trial objective l2 held-out reward time state" in text
    points = [(t.held_out["held_out/reward"], t.held_out["held_out/regularizers/l2"], t.number)
              for t in search.completed]  # fmt: skip
    best = [
        number
        for x, y, number in sorted(points)
        if not any((a >= x and b <= y) and (a, b) != (x, y) for a, b, _ in points)
    ]
    trace = charts["pareto-0"]["data"][0]
    assert trace["name"] == "not dominated"
    assert trace["text"] == [str(number) for number in best]


def test_sums_with_tuned_weights_are_not_drawn_against_terms(tmp_path: Path) -> None:
    span = {"tune": [0.1, 10.0]}
    rewards = [reward(letters), reward(brief, name="brief", weight=span)]
    config = small_rollouts(
        tmp_path,
        "tune.trials=2", "train.steps=1", "tune.objective=held_out/rewards/letters",
        rewards=rewards, regularizers=[L2],
    )  # fmt: skip
    tune(config, tmp_path / "search")
    page = write_report([tmp_path / "search"], tmp_path / "report.html")
    text = text_of(page)
    assert "pareto-0" not in page_charts(page)
    assert "with rewards.brief = " in text
    assert "trial objective rewards.brief held-out reward, own weights time state" in text
