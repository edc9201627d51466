"""Rewards and answers of a step as rows and facts."""

from __future__ import annotations

from steelyard.experiment.run.step_rows import RewardRow, answer_facts, reward_rows

from .example_metrics import metrics, on_policy


def test_a_row_has_the_numbers_of_a_reward() -> None:
    assert reward_rows(on_policy()) == [
        RewardRow("short", 0.4375, 0.125, 1.0, 0),
        RewardRow("judge/1", -0.001234, 0.0009876, 0.05, 2),
    ]


def test_a_reward_that_failed_for_every_answer() -> None:
    (row,) = reward_rows({"rewards/judge/weight": 1.0, "rewards/judge/failed": 8.0})
    assert row == RewardRow("judge", None, None, 1.0, 8)
    assert row.text == "failed"


def test_answers_that_were_not_dropped_are_not_counted() -> None:
    assert "dropped 2" in answer_facts(on_policy())
    assert not any("dropped" in each for each in answer_facts(on_policy(**{"rollouts/dropped": 0})))


def test_a_run_without_rollouts_has_neither() -> None:
    assert reward_rows(metrics()) == []
    assert answer_facts(metrics()) == []
