"""Charts of on-policy runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.experiment.report import write_report
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.reward_charts import reward_sections
from steelyard.experiment.report.reward_metrics import rollout_findings

from .on_policy_runs import STEPS, WEIGHT, OnPolicyRun, train_on_policy
from .parsed_page import page_charts, text_of, trace_points


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OnPolicyRun:
    return train_on_policy(tmp_path_factory.mktemp("on_policy"))


@pytest.fixture(scope="module")
def page(run: OnPolicyRun) -> Path:
    return write_report([run.folder], run.folder.parent / "report.html")


def totals(records: list[dict[str, Any]]) -> list[float]:
    kept = [each["rewards"] for each in records if each["rewards"]["judge"] is not None]
    return [each["letters"] + WEIGHT * each["judge"] for each in kept]


def test_the_sum_has_a_band_and_held_out_points(run: OnPolicyRun, page: Path) -> None:
    points = trace_points(page_charts(page)["reward"])
    by_step = [totals(run.at(step)) for step in range(STEPS)]
    means = np.array([np.mean(each) for each in by_step])
    spreads = np.array([np.std(each, ddof=1) for each in by_step])
    assert points["reward"][0] == list(range(STEPS))
    assert points["reward"][1] == pytest.approx(means)
    assert points["reward + std"][1] == pytest.approx(means + spreads)
    assert points["reward − std"][1] == pytest.approx(means - spreads)
    steps = [0, 3, 6, STEPS - 1]
    held_out = [np.mean(totals(run.at(step, held_out=True))) for step in steps]
    assert points["held-out"][0] == steps
    assert points["held-out"][1] == pytest.approx(held_out)


def test_each_reward_has_a_chart(run: OnPolicyRun, page: Path) -> None:
    charts = page_charts(page)
    for index, name in enumerate(("letters", "judge")):
        points = trace_points(charts[f"reward-{index}"])
        means = [
            np.mean([e["rewards"][name] for e in run.at(s) if e["rewards"][name] is not None])
            for s in range(STEPS)
        ]
        assert points[name][1] == pytest.approx(means)
        assert points["held-out"][0] == [0, 3, 6, STEPS - 1]


def test_the_answers_have_a_chart_of_each_metric(run: OnPolicyRun, page: Path) -> None:
    charts = page_charts(page)
    titles = [
        "Groups without signal", "Tokens per answer", "Truncated answers", "Entropy",
        "KL to the base model", "Clipped tokens", "Dropped answers",
    ]  # fmt: skip
    shown = [trace_points(charts[f"answers-{index}"]) for index in range(7)]
    assert [list(each) for each in shown] == [[title] for title in titles]
    dropped = [
        sum(each["rewards"]["judge"] is None for each in run.at(step)) for step in range(STEPS)
    ]
    assert shown[6]["Dropped answers"][1] == dropped
    assert shown[4]["KL to the base model"][1] == [row["rollouts/kl"] for row in run.metrics]
    own = [each for each in charts if each.startswith("own-")]
    assert not any("rollouts" in str(charts[each]) for each in own), "they are not of a term"


def loaded(**row: float) -> LoadedRun:
    row = {"rewards/a/weight": 1.0, "rewards/a/mean": 0.5, "rewards/a/std": 0.1, **row}
    row |= {"rollouts/reward": 0.5, "rollouts/reward_std": 0.1, "rollouts/dropped": 0.0}
    return LoadedRun("run", Path(), {}, [{"step": 0, **row}])


def test_a_single_reward_is_shown_once_and_no_empty_chart() -> None:
    run = loaded()
    rewards, answers = reward_sections(run, rollout_findings(run))
    assert [figure.key for figure in rewards.figures] == ["reward"]
    assert answers.figures == [], "no answer was dropped"
    weighted = loaded(**{"rewards/a/weight": 2.0})
    rewards, _ = reward_sections(weighted, rollout_findings(weighted))
    assert [figure.key for figure in rewards.figures] == ["reward", "reward-0"]


def test_a_run_without_rollouts_has_no_such_section() -> None:
    run = LoadedRun("run", Path(), {}, [{"step": 0, "loss_total": 1.0}])
    assert reward_sections(run, rollout_findings(run)) == []


def test_the_page_has_tiles_and_a_table_of_rewards_instead_of_losses(page: Path) -> None:
    text = text_of(page)
    for part in ("Held-out reward", "Groups without signal", "reward mean spread weight held-out"):
        assert part in text
    assert "Held-out loss" not in text
    assert "2 rewards" in text


def test_several_runs_are_compared_by_rewards(
    run: OnPolicyRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("other")
    other = train_on_policy(folder, "train.steps=3", "rollouts.seed=7")
    page = write_report([run.folder, other.folder], folder / "report.html")
    charts = page_charts(page)
    names = [f"{each.folder.parent.name}/run" for each in (run, other)]
    keys = {
        "reward": "rollouts/reward", "reward-held-out": "held_out/reward",
        "reward-mean-0": "rewards/letters/mean", "reward-held-out-1": "held_out/rewards/judge",
        "answers-0": "rollouts/no_signal", "answers-3": "rollouts/entropy",
    }  # fmt: skip
    for key, metric in keys.items():
        points = trace_points(charts[key])
        assert list(points) == names
        for name, each in zip(names, (run, other), strict=True):
            rows = [row for row in each.metrics if metric in row]
            assert points[name] == ([row["step"] for row in rows], [row[metric] for row in rows])
    text = text_of(page)
    assert "run steps reward held-out reward time per step" in text
    assert "Their rollouts differ, so held-out rewards are not compared." in text, "another seed"
