"""Statistics of on-policy runs, computed again from the answers on record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steelyard.experiment.page.load import LoadedRun
from steelyard.experiment.page.run_statistics import Change, RolloutStatistics, rollout_statistics

from .on_policy_runs import FAILING_LINE, STEPS, WEIGHT, OnPolicyRun, train_on_policy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OnPolicyRun:
    return train_on_policy(tmp_path_factory.mktemp("on_policy"))


def change_by_hand(values: list[float], over: int = STEPS // 4) -> tuple[float, float]:
    return float(np.mean(values[:over])), float(np.mean(values[-over:]))


def both(change: Change | None) -> tuple[float, float]:
    assert change is not None
    return change.first, change.last


def scores(records: list[dict[str, Any]], name: str) -> list[float]:
    return [each["rewards"][name] for each in records if each["rewards"][name] is not None]


def test_the_rewards_are_means_over_answers(run: OnPolicyRun) -> None:
    found = rollout_statistics(run.loaded)
    assert found is not None
    assert [(each.name, each.weight) for each in found.rewards] == [("letters", 1), ("judge", 0.5)]
    for reward in found.rewards:
        steps = [scores(run.at(step), reward.name) for step in range(STEPS)]
        expected = change_by_hand([float(np.mean(each)) for each in steps])
        assert both(reward.mean) == pytest.approx(expected)
        spreads = [float(np.std(each, ddof=1)) for each in steps]
        assert reward.std == pytest.approx(np.mean(spreads))
        first, last = (scores(run.at(s, held_out=True), reward.name) for s in (0, STEPS - 1))
        assert both(reward.held_out) == pytest.approx((np.mean(first), np.mean(last)))


def test_the_sum_is_over_answers_that_were_not_dropped(run: OnPolicyRun) -> None:
    found = rollout_statistics(run.loaded)
    assert found is not None

    def total(records: list[dict[str, Any]]) -> float:
        kept = [each["rewards"] for each in records if each["rewards"]["judge"] is not None]
        return float(np.mean([each["letters"] + WEIGHT * each["judge"] for each in kept]))

    expected = change_by_hand([total(run.at(step)) for step in range(STEPS)])
    assert both(found.total) == pytest.approx(expected)
    ends = [total(run.at(step, held_out=True)) for step in (0, STEPS - 1)]
    assert both(found.held_out) == pytest.approx(ends)
    assert found.fixed_weights
    assert found.only_reward is None


def test_dropped_answers_are_counted_with_their_reason(run: OnPolicyRun) -> None:
    found = rollout_statistics(run.loaded)
    assert found is not None
    sampled = [each for each in run.records if "held_out" not in each]
    failing = [each for each in sampled if each["line"] == FAILING_LINE]
    assert 0 < len(failing) < len(sampled) == 8 * STEPS
    assert (found.answers, found.dropped) == (len(sampled), len(failing))
    (reason,) = found.reasons
    assert reason.startswith("“judge” failed: ConnectionError: the judge is down")
    assert found.reasons[reason] == len(failing)
    assert [each.failed for each in found.rewards] == [0, len(failing)]


def test_groups_without_signal_lengths_and_truncation(run: OnPolicyRun) -> None:
    found = rollout_statistics(run.loaded)
    assert found is not None
    silent, lengths, truncated = [], [], []
    for step in range(STEPS):
        records = run.at(step)
        groups = [
            {e["reward"] for e in records if e["group"] == group and e["reward"] is not None}
            for group in range(2)
        ]
        silent += [len(each) < 2 for each in groups]
        lengths.append(float(np.mean([each["tokens"] for each in records])))
        truncated += [each["truncated"] for each in records]
    assert found.no_signal == pytest.approx(np.mean(silent))
    assert both(found.tokens) == pytest.approx(change_by_hand(lengths))
    assert found.truncated == pytest.approx(np.mean(truncated))
    assert found.kl is not None


def of_rows(*rows: dict[str, Any], **more: Any) -> RolloutStatistics | None:
    numbered = [{"step": step, **row} for step, row in enumerate(rows)]
    return rollout_statistics(LoadedRun("run", Path(), more.pop("config", {}), numbered, **more))


def test_a_run_without_rewards_has_none() -> None:
    assert of_rows({"loss_total": 1.0}) is None


def test_sums_with_other_weights_are_not_compared() -> None:
    weights = ({"rewards/a/weight": w, "rollouts/reward": w, "held_out/reward": w} for w in (1, 2))
    found = of_rows(*weights)
    assert found is not None
    assert (found.total, found.held_out, found.fixed_weights) == (None, None, False)


@pytest.mark.parametrize(
    ("weights", "name"),
    [((1.0, 0.0), "a"), ((1.0, 0.5), None), ((0.5, 0.0), None), ((0.0, 1.0), "b")],
)
def test_the_sum_may_equal_one_reward(weights: tuple[float, float], name: str | None) -> None:
    found = of_rows({"rewards/a/weight": weights[0], "rewards/b/weight": weights[1]})
    assert found is not None
    assert (found.only_reward.name if found.only_reward else None) == name


def test_only_an_enabled_reward_is_the_reason_of_a_drop() -> None:
    config = {"rewards": [{"use": "x", "enabled": False}, {"use": "y"}]}
    failed = {"off": "OSError: away", "on": "no number"}
    rewards = {"off": None, "on": None}
    records = [
        {"answer": "", "reward": None, "rewards": rewards, "failed": failed},
        {"answer": "", "reward": None, "rewards": {}},
        {"answer": "", "reward": None, "rewards": {}, "held_out": True},
        {"answer": "", "reward": 1.0, "rewards": {"off": None, "on": 1.0}, "failed": failed},
    ]
    row = {"rewards/off/weight": 0.0, "rewards/on/weight": 1.0, "rollouts/dropped": 2.0}
    found = of_rows(row, config=config, rollouts=records)
    assert found is not None
    assert found.reasons == {"“on” failed: no number": 1, "no tokens": 1}
    assert (found.answers, found.dropped) == (3, 2)
