"""Metrics of answers against values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tinker import types

from steelyard.experiment.data.files import Prompt
from steelyard.experiment.rewards.reward import Reward, Score
from steelyard.experiment.rollouts.answers import Answer, ScoredAnswer, compare_answers
from steelyard.experiment.rollouts.metrics import (
    group_metrics,
    held_out_metrics,
    kl_metric,
    mean_and_std,
    reward_metrics,
)

PROMPT = Prompt(1, {"prompt": "a"}, [1], {})


def scored(
    value: float | None, logprobs: tuple[float, ...] = (-1.0,), *, truncated: bool = False
) -> ScoredAnswer:
    answer = Answer(PROMPT, 0, [7] * len(logprobs), list(logprobs), "x", truncated)
    error = "down" if value is None else None
    total = None if value is None else 2.0 * value
    return ScoredAnswer(answer, {"judge": Score(value, error)}, total)


def judge(weight: float = 2.0) -> Reward:
    return Reward("judge", lambda record, answer: 0.0, weight=weight)


def test_mean_and_spread_of_each_reward() -> None:
    answers = [scored(1.0), scored(0.0), scored(None), scored(0.5)]
    assert reward_metrics([judge()], answers, step=0) == {
        "rewards/judge/mean": pytest.approx(0.5),
        "rewards/judge/std": pytest.approx(0.5),
        "rewards/judge/weight": 2.0,
        "rewards/judge/failed": 1.0,
        "rollouts/reward": pytest.approx(1.0),
        "rollouts/reward_std": pytest.approx(1.0),
    }


def test_a_reward_that_always_fails_has_no_mean() -> None:
    metrics = reward_metrics([judge()], [scored(None)], step=0)
    assert metrics == {"rewards/judge/weight": 2.0, "rewards/judge/failed": 1.0}


def test_groups_without_a_signal_are_counted() -> None:
    groups = [
        [scored(1.0), scored(1.0)],  # equal
        [scored(1.0), scored(None)],  # one is left
        [scored(1.0, (-1.0, -3.0), truncated=True), scored(0.0)],
    ]
    compared = compare_answers(groups, {"judge": 2.0}, "grpo", normalize=True)
    assert group_metrics(compared) == {
        "rewards/judge/no_signal": pytest.approx(2 / 3),
        "rollouts/no_signal": pytest.approx(2 / 3),
        "rollouts/dropped": 1.0,
        "rollouts/answer_tokens": pytest.approx(7 / 6),
        "rollouts/truncated": pytest.approx(1 / 6),
        "rollouts/entropy": pytest.approx(9 / 7),
    }


def test_kl_is_over_the_tokens_of_the_answers() -> None:
    def datum(**fields: list[float]) -> types.Datum:
        arrays = {
            name: types.TensorData.from_numpy(np.array(values, np.float32))
            for name, values in fields.items()
        }
        return types.Datum(model_input=types.ModelInput.from_ints([1, 1]), loss_fn_inputs=arrays)

    data = [
        datum(weights=[0.0, 1.0], logprobs=[0.0, -1.0], reference_logprobs=[-5.0, -2.0]),
        datum(weights=[0.0, 1.0], logprobs=[0.0, -1.0], reference_logprobs=[-5.0, -1.0]),
    ]
    # log r = -1 and 0: e^-1 - 1 + 1, and 0.
    assert kl_metric(data) == {"rollouts/kl": pytest.approx(math.exp(-1) / 2)}
    assert kl_metric([datum(weights=[0.0, 1.0], logprobs=[0.0, -1.0])]) == {}
    assert kl_metric([]) == {}


def test_held_out_rewards() -> None:
    assert held_out_metrics([judge()], [scored(1.0), scored(None)], step=0) == {
        "held_out/rewards/judge": 1.0,
        "held_out/reward": 2.0,
        "held_out/dropped": 1.0,
    }


def test_one_value_has_no_spread() -> None:
    assert mean_and_std([3.0]) == (3.0, 0.0)
