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
from steelyard.experiment.compare.search_results import read_search, storage_url
from steelyard.experiment.page.formatting import number
from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.search import non_dominated
from tests.experiment.small_runs import L2, brief, letters, reward, small_config, small_rollouts

from .frozen_page import compared_in, table_of

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
    document = compared_in(page)
    best = search.trials[0]
    assert (document["kind"], document["title"]) == ("search", "Search: search")
    assert document["headline"] == "4 trials: 4 completed."
    assert document["sentences"][0].startswith(f"The best is trial {best.number}, with l2 = ")
    assert any(s.startswith("Importances mean little for 4") for s in document["sentences"])
    assert document["sentences"][-1].endswith("steelyard train search/best.json.")
    table = table_of(document, "Trials")
    assert list(table) == [str(trial.number) for trial in search.trials]
    for trial in search.trials:
        assert trial.objective is not None
        row = table[str(trial.number)]
        assert row["objective"][0].startswith(f"{trial.objective.mean:.3f} ±")
        assert row["l2"][0] == number(trial.weights["l2"])
        assert row["state"][0] == "completed"
    assert table[str(best.number)]["from the best"][0] == "–"
    shown = document["search"]
    by_name = {each["name"]: each["value"] for each in shown["importances"]}
    assert by_name == pytest.approx(search.importances)
    by_number = sorted(search.trials, key=lambda trial: trial.number)
    objectives = [trial.objective.mean for trial in by_number if trial.objective]
    assert shown["history"]["values"] == objectives
    assert shown["history"]["best"] == [min(objectives[: n + 1]) for n in range(4)]
    assert [each["log"] for each in shown["parameters"]] == [
        is_wide([trial.weights[name] for trial in search.trials]) for name in ("l2", "l1")
    ]
    points = {(p["number"], p["x"], p["y"]) for p in shown["parameters"][0]["points"]}
    assert points == {
        (t.number, t.weights["l2"], t.objective.mean) for t in by_number if t.objective
    }
    losses = [trial.held_out["held_out/loss"] for trial in search.trials]
    values = [trial.held_out["held_out/regularizers/l2"] for trial in search.trials]
    front = non_dominated(list(zip(losses, values, strict=True)))
    drawn = next(chart for chart in shown["pareto"] if chart["title"] == "l2")
    kept = {trial.number for trial, stays in zip(search.trials, front, strict=True) if stays}
    assert {point["number"] for point in drawn["points"] if point["front"]} == kept
    assert sorted(point["x"] for point in drawn["points"]) == sorted(losses)
    assert [run["label"] for run in document["runs"]] == [f"trial {n}" for n in table]


def is_wide(values: list[float]) -> bool:
    return min(values) > 0 and max(values) >= 10 * min(values)


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
    document = compared_in(page)
    rewards = [trial.held_out["held_out/reward"] for trial in search.trials]
    assert rewards == sorted(rewards, reverse=True), "the best first"
    assert f": held_out/reward {number(rewards[0])}, the highest." in document["sentences"][0]
    assert list(table_of(document, "Trials")["0"]) == [
        "objective", "l2", "held-out reward", "time", "state",
    ]  # fmt: skip
    chart = document["search"]["pareto"][0]
    assert (chart["x"], chart["step"]) == ("held-out reward", "vh")
    assert document["search"]["history"]["best"][-1] == max(rewards)
    points = [(t.held_out["held_out/reward"], t.held_out["held_out/regularizers/l2"], t.number)
              for t in search.completed]  # fmt: skip
    best = {
        number
        for x, y, number in points
        if not any((a >= x and b <= y) and (a, b) != (x, y) for a, b, _ in points)
    }
    assert {point["number"] for point in chart["points"] if point["front"]} == best


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
    document = compared_in(page)
    assert document["search"]["pareto"] == []
    assert "with rewards.brief = " in document["sentences"][0]
    assert list(table_of(document, "Trials")["0"]) == [
        "objective", "rewards.brief", "held-out reward, own weights", "time", "state",
    ]  # fmt: skip
