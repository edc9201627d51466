"""Advantages against definitions written out with NumPy, against TRL, and their split by reward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.composition.advantages import Advantage, advantages, fewest_answers
from steelyard.errors import InputError
from tests.integrations.huggingface.trl_trainers import build

REWARDS = [0.3, -1.2, 4.0, 0.3, 2.5]
KINDS: tuple[Advantage, ...] = ("grpo", "rloo", "gdpo", "none")
NUMBERS = st.floats(-10, 10).map(lambda value: round(value, 3))


def alone(rewards: Sequence[float], kind: Advantage, *, normalize: bool = True) -> list[float]:
    """Advantages of one group with one reward."""
    return list(advantages([{"reward": rewards}], kind, normalize=normalize).total[0])


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[dict[str, list[float]]], dict[str, float]]:
    """Two rewards of some groups of some answers, and their weights."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    groups = [
        {name: draw(st.lists(NUMBERS, min_size=n, max_size=n)) for name in ("a", "b")}
        for n in sizes
    ]
    return groups, {name: draw(st.floats(0, 3)) for name in ("a", "b")}


def test_grpo_is_the_standardised_reward() -> None:
    rewards = np.array(REWARDS)
    centred = rewards - rewards.mean()
    assert alone(REWARDS, "grpo", normalize=False) == pytest.approx(centred)
    expected = centred / (rewards.std(ddof=1) + 1e-4)
    assert alone(REWARDS, "grpo") == pytest.approx(expected, rel=1e-12)


def trl_advantages(
    folder: Path, rewards: np.ndarray[Any, Any], weights: Sequence[float], **config: Any
) -> list[float]:
    """Advantages that TRL 1.16's own trainer writes down, for groups of four answers.

    Args:
        folder: that it writes to.
        rewards: of each answer, [answers, rewards].
        weights: of the rewards.
        config: further arguments of `GRPOConfig`.
    """
    trainer = build(
        "GRPO",
        folder,
        log_completions=True,
        report_to="none",
        beta=0.0,
        per_device_train_batch_size=len(rewards),
        max_steps=1,
        logging_steps=1,
        **config,
    )
    columns = [iter(column) for column in rewards.T.tolist()]
    trainer.reward_funcs = [
        lambda completions, column=column, **_: [next(column) for _ in completions]
        for column in columns
    ]
    trainer.reward_func_names = [f"reward {index}" for index, _ in enumerate(columns)]
    trainer.reward_processing_classes = [None] * len(columns)
    trainer.reward_weights = torch.tensor(weights)
    for index, _ in enumerate(columns):
        trainer._logs["rewards"][f"reward {index}"] = type(trainer._logs["advantages"])(maxlen=64)
    trainer.train()
    (file,) = (folder / "completions").glob("*.parquet")
    table = pd.read_parquet(file)
    given = np.stack([table[name] for name in trainer.reward_func_names], axis=1)
    np.testing.assert_allclose(given, rewards, rtol=1e-6)  # it kept the order
    found: list[float] = table["advantage"].tolist()
    return found


def in_groups(rewards: np.ndarray[Any, Any]) -> list[dict[str, list[float]]]:
    """The same rewards in groups of four."""
    return [
        {str(k): rewards[start : start + 4, k].tolist() for k in range(rewards.shape[1])}
        for start in range(0, len(rewards), 4)
    ]


def test_grpo_is_that_of_trl(tmp_path: Path) -> None:
    rewards = np.array([[0.3], [-1.2], [4.0], [0.3], [0.0], [0.0], [2e-4], [0.0]])
    found = trl_advantages(tmp_path, rewards, [1.0])
    ours = [a for group in advantages(in_groups(rewards)).total for a in group]
    assert ours == pytest.approx(found, rel=1e-3, abs=1e-5)
    # One reward is 2e-4 above the others: the deviation of the group is as large as the constant.
    assert max(found[4:]) == pytest.approx(1.5e-4 / (1e-4 + 1e-4), rel=0.01)


@pytest.mark.parametrize("seed", [0, 1])
def test_gdpo_is_that_of_trl(seed: int, tmp_path: Path) -> None:
    """Random rewards: a binary one, one of large scale, one that is equal in some groups."""
    random = np.random.default_rng(seed)
    binary = random.integers(0, 2, 16)
    rewards = np.stack(
        [binary, random.normal(50, 20, 16), random.normal(size=16).clip(0, 1)], axis=1
    ).astype(np.float32)
    rewards[:4, 2] = 0.5
    rewards[4:8] = rewards[4]
    weights = [1.0, 0.3, 2.0]
    found = trl_advantages(
        tmp_path, rewards, weights, multi_objective_aggregation="normalize_then_sum"
    )
    by_name = {str(k): weight for k, weight in enumerate(weights)}
    ours = [a for g in advantages(in_groups(rewards), "gdpo", by_name).total for a in g]
    assert ours == pytest.approx(found, rel=1e-4, abs=1e-5)
    assert ours[4:8] == [0.0] * 4


def test_gdpo_reads_only_ratios_of_weights_and_no_scales() -> None:
    groups = [
        {"a": [1.0, 0.0, 0.0, 1.0], "b": [3.0, 1.0, 2.0, 5.0]},
        {"a": [1.0, 0.0], "b": [2.0, 4.0]},
    ]
    scaled = [{"a": group["a"], "b": [20 * b - 7 for b in group["b"]]} for group in groups]
    first = advantages(groups, "gdpo", {"a": 1.0, "b": 0.5}).total
    for other in (
        advantages(scaled, "gdpo", {"a": 1.0, "b": 0.5}).total,
        advantages(groups, "gdpo", {"a": 4.0, "b": 2.0}).total,
    ):
        for ours, expected in zip(other, first, strict=True):
            assert ours == pytest.approx(expected, rel=1e-3)


def test_a_reward_of_large_scale_turns_a_correct_answer_away_under_the_sum_alone() -> None:
    groups = [{"correct": [1.0, 0.0, 0.0, 0.0], "short": [0.3, 0.5, 0.4, 0.2]}]
    loud = [{"correct": groups[0]["correct"], "short": [20 * s for s in groups[0]["short"]]}]
    assert advantages(groups).total[0][0] > 1
    assert advantages(loud).total[0][0] < 0
    assert advantages(loud, "gdpo").total[0][0] > 0.5


def test_with_one_reward_gdpo_is_larger_than_grpo_where_groups_have_no_signal() -> None:
    """Groups without a signal count in the last standard deviation."""
    groups = [{"r": [1.0, 0.0] * 4}] * 5 + [{"r": [0.0] * 8}] * 11
    grpo, gdpo = advantages(groups).total[0][0], advantages(groups, "gdpo").total[0][0]
    # 40 of 128 answers have z = ±0.935: S = 0.935 √(40/127) = 0.525.
    assert gdpo / grpo == pytest.approx(1 / (0.9354 * (40 / 127) ** 0.5), rel=1e-3)


def test_gdpo_gives_a_nearly_constant_reward_as_much_as_a_binary_one() -> None:
    groups = [{"binary": [1.0, 0.0, 1.0, 0.0], "constant": [0.9, 0.902, 0.9, 0.902]}]
    parts = advantages(groups, "gdpo").by_reward[0]
    assert abs(parts["constant"][0]) == pytest.approx(abs(parts["binary"][0]), rel=0.1)


def test_rloo_leaves_the_answer_itself_out_of_its_baseline() -> None:
    expected = [
        reward - np.mean(REWARDS[:index] + REWARDS[index + 1 :])
        for index, reward in enumerate(REWARDS)
    ]
    assert alone(REWARDS, "rloo") == pytest.approx(expected, rel=1e-12)


def test_none_is_the_reward() -> None:
    assert alone([1, 0], "none") == [1.0, 0.0]
    assert alone([0.1, 0.1], "none") == [0.1, 0.1]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "gdpo"])
def test_groups_that_cannot_be_compared_have_no_advantages(kind: Advantage) -> None:
    # 0.1 three times has a mean that is not 0.1: the differences would not be 0.
    assert alone([0.1] * 3, kind) == [0.0] * 3
    assert alone([5.0], kind) == [0.0]
    assert alone([], kind) == []
    assert advantages([], kind).total == []
    assert fewest_answers(kind) == 2
    assert fewest_answers("none") == 1


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rewards_that_cancel_have_no_parts(kind: Advantage) -> None:
    """Divided by a standard deviation of 0 the parts would be large, and add up to nothing."""
    found = advantages([{"a": [1.0, 0.0], "b": [0.0, 1.0]}], kind)
    assert found.total == [[0.0, 0.0]]
    assert found.by_reward == [{"a": [0.0, 0.0], "b": [0.0, 0.0]}]


@given(steps(), st.sampled_from(KINDS), st.booleans())
def test_the_parts_add_up_to_the_advantages(
    step: tuple[list[dict[str, list[float]]], dict[str, float]], kind: Advantage, normalize: bool
) -> None:
    groups, weights = step
    found = advantages(groups, kind, weights, normalize=normalize)
    for total, parts in zip(found.total, found.by_reward, strict=True):
        added = np.sum([parts[name] for name in weights], axis=0)
        assert np.asarray(total) == pytest.approx(added, rel=1e-9, abs=1e-9)


def test_the_parts_share_the_scale_of_the_total() -> None:
    right, weights = [1.0, 0.0, 0.0, 1.0, 1.0], {"a": 1.0, "b": 2.0}
    groups = [{"a": REWARDS, "b": right}]
    a, b = np.array(REWARDS), np.array(right)
    scale = (a + 2 * b).std(ddof=1) + 1e-4
    parts = advantages(groups, "grpo", weights).by_reward[0]
    assert parts["a"] == pytest.approx((a - a.mean()) / scale, rel=1e-9)
    assert parts["b"] == pytest.approx(2 * (b - b.mean()) / scale, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([{"a": [1.0]}], "gdp"), "advantage must be one of 'grpo', 'rloo', 'gdpo', 'none', got"),
        (([{}],), "a group must have at least one reward, got none."),
        (([{"a": [1.0]}], "grpo", {"b": 1.0}), "for each reward, ['a'], got none for 'a'."),
        (([{"a": [1.0]}], "grpo", {"a": -1.0}), "weights['a'] must be a number >= 0, got -1.0."),
        (([{"a": [1.0]}, {"b": [1.0]}],), "the same rewards, ['a'], got ['b'] in group 1."),
        (([{"a": [1.0], "b": []}],), "one value for each answer, got {'a': 1, 'b': 0} of them."),
        (([{"a": [float("nan")]}],), "got nan in group 0: leave that answer out."),
    ],
)
def test_rules(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        advantages(*arguments)
