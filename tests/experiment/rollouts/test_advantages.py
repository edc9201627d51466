"""Advantages against definitions written out with NumPy, and groups without a signal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from steelyard.experiment.rollouts.advantages import advantages, fewest_answers, has_signal
from tests.integrations.huggingface.trl_trainers import build

REWARDS = [0.3, -1.2, 4.0, 0.3, 2.5]


def test_grpo_is_the_standardised_reward() -> None:
    rewards = np.array(REWARDS)
    centred = rewards - rewards.mean()
    assert advantages(REWARDS, "grpo", normalize=False) == pytest.approx(centred)
    expected = centred / (rewards.std(ddof=1) + 1e-4)
    assert advantages(REWARDS, "grpo") == pytest.approx(expected, rel=1e-12)


def test_grpo_is_that_of_trl(tmp_path: Path) -> None:
    """Against the advantages that TRL 1.16's own trainer writes down."""
    rewards = iter([0.3, -1.2, 4.0, 0.3, 0.0, 0.0, 2e-4, 0.0])
    trainer = build(
        "GRPO",
        tmp_path,
        log_completions=True,
        report_to="none",
        beta=0.0,
        per_device_train_batch_size=8,
        max_steps=1,
        logging_steps=1,
    )
    trainer.reward_funcs = [lambda completions, **_: [next(rewards) for _ in completions]]
    trainer.train()
    (file,) = (tmp_path / "completions").glob("*.parquet")
    table = pd.read_parquet(file)
    column = next(name for name in table.columns if name == "length_reward")
    found, given = table["advantage"].tolist(), table[column].tolist()
    for start in (0, 4):
        group = slice(start, start + 4)
        assert advantages(given[group], "grpo") == pytest.approx(found[group], rel=1e-3, abs=1e-5)
    # One reward is 2e-4 above the others: the deviation of the group is as large as the constant.
    assert max(found[4:]) == pytest.approx(1.5e-4 / (1e-4 + 1e-4), rel=0.01)


def test_rloo_leaves_the_answer_itself_out_of_its_baseline() -> None:
    expected = [
        reward - np.mean(REWARDS[:index] + REWARDS[index + 1 :])
        for index, reward in enumerate(REWARDS)
    ]
    assert advantages(REWARDS, "rloo") == pytest.approx(expected, rel=1e-12)


def test_none_is_the_reward() -> None:
    assert advantages([1, 0], "none") == [1.0, 0.0]
    assert advantages([0.1, 0.1], "none") == [0.1, 0.1]


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_groups_that_cannot_be_compared_have_no_advantages(kind: str) -> None:
    # 0.1 three times has a mean that is not 0.1: the differences would not be 0.
    assert advantages([0.1] * 3, kind) == [0.0] * 3  # type: ignore[arg-type]
    assert advantages([5.0], kind) == [0.0]  # type: ignore[arg-type]
    assert advantages([], kind) == []  # type: ignore[arg-type]
    assert not has_signal([0.1] * 3, kind)  # type: ignore[arg-type]
    assert fewest_answers(kind) == 2  # type: ignore[arg-type]


def test_one_reward_is_a_signal_without_a_comparison() -> None:
    assert has_signal([1.0], "none")
    assert not has_signal([0.0, 0.0], "none")
    assert fewest_answers("none") == 1
