"""Rewards that depend on others: gates, scales, functions of scores, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError, SpecError
from steelyard.experiment.rewards.reward import Reward, in_order
from steelyard.experiment.rewards.scoring import AnsweredRecord, score
from steelyard.experiment.training.terms import build_terms
from tests.experiment.small_runs import small_rollouts

ANSWERS: list[AnsweredRecord] = [({}, text) for text in ("4", "four", "4!", "5")]


def correct(record: Mapping[str, Any], answer: str) -> float:
    return float("4" in answer)


def size(record: Mapping[str, Any], answer: str) -> float:
    return float(len(answer))


def fails_on_words(record: Mapping[str, Any], answer: str) -> float:
    if answer.isalpha():
        raise ValueError("no digit")
    return 1.0


def both(record: Mapping[str, Any], answer: str, *, scores: Mapping[str, float]) -> float:
    return scores["correct"] - 0.1 * scores["size"]


async def doubled(record: Mapping[str, Any], answer: str, scores: Mapping[str, float]) -> float:
    scores = dict(scores)
    assert scores.keys() == {"correct"}
    return 2 * scores["correct"]


doubled.reads_scores = ["correct"]  # type: ignore[attr-defined]


def names_one_that_is_missing(
    record: Mapping[str, Any], answer: str, scores: Mapping[str, float]
) -> float:
    return 0.0


names_one_that_is_missing.reads_scores = ["corect"]  # type: ignore[attr-defined]


def values(rewards: Sequence[Reward], groups: Sequence[int] | None = None) -> dict[str, Any]:
    found = score(rewards, ANSWERS, timeout=30.0, groups=groups)
    return {name: [each.value for each in scores] for name, scores in found.items()}


def test_a_gate_lets_a_reward_count_where_another_is_above_0() -> None:
    found = values([Reward("short", size, gate="correct"), Reward("correct", correct)])
    assert list(found) == ["short", "correct"]  # the order in which they were given
    assert found["correct"] == [1.0, 0.0, 1.0, 0.0]
    assert found["short"] == [1.0, 0.0, 2.0, 0.0]


def test_a_scale_is_the_mean_of_a_group() -> None:
    rewards = [Reward("correct", correct), Reward("size", size, scale_by="correct")]
    assert values(rewards)["size"] == [0.5, 2.0, 1.0, 0.5]  # half are correct
    assert values(rewards, [0, 1, 0, 1])["size"] == [1.0, 0.0, 2.0, 0.0]


def test_gates_stack_on_values_as_they_count() -> None:
    rewards = [
        Reward("last", size, gate="short", scale_by="correct"),
        Reward("short", size, gate="correct"),
        Reward("correct", correct),
    ]
    assert values(rewards)["last"] == [0.5, 0.0, 1.0, 0.0]
    assert [[r.name for r in together] for together in in_order(rewards)] == [
        ["correct"],
        ["short"],
        ["last"],
    ]


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_a_function_takes_the_values_of_the_others(run_in: Any) -> None:
    rewards = [
        Reward("mixed", both, run_in=run_in),
        Reward("correct", correct),
        Reward("size", size),
        Reward("doubled", doubled),
    ]
    found = values(rewards)
    assert found["mixed"] == pytest.approx([0.9, -0.4, 0.8, -0.1])
    assert found["doubled"] == [2.0, 0.0, 2.0, 0.0]


def test_two_functions_of_scores_declare_what_they_read() -> None:
    rewards = [Reward("mixed", both), Reward("correct", correct), Reward("other", both)]
    with pytest.raises(SpecError, match="'mixed' reads 'other' reads 'mixed': remove a gate"):
        in_order(rewards)


def test_where_a_gate_fails_the_reward_has_no_value() -> None:
    rewards = [
        Reward("checked", fails_on_words),
        Reward("size", size, gate="checked"),
        Reward("scaled", size, scale_by="checked"),
        Reward("mixed", both, options={"scores": {"correct": 1.0, "size": 0.0}}),
    ]
    found = score(rewards, ANSWERS, timeout=30.0, groups=[0, 1, 0, 0])
    assert [each.value for each in found["size"]] == [1.0, None, 2.0, 1.0]
    assert found["size"][1].error == (
        "it needs the reward 'checked', which failed: ValueError: no digit"
    )
    assert found["scaled"][1].error is not None
    assert "no answer of the group has it" in found["scaled"][1].error
    # An option of that name is the user's own.
    assert [each.value for each in found["mixed"]] == [1.0] * 4


def test_a_function_of_scores_fails_where_one_of_them_has() -> None:
    def total(record: Any, answer: str, scores: Mapping[str, float]) -> float:
        return sum(scores.values())

    found = score([Reward("all", total), Reward("checked", fails_on_words)], ANSWERS, timeout=30.0)
    assert [each.value for each in found["all"]] == [1.0, None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (
            [Reward("size", size, gate="corect"), Reward("correct", correct)],
            "gate must be the name of another reward, one of 'correct', got 'corect'; did you mean",
        ),
        (
            [Reward("size", size, scale_by="other")],
            "scale_by must be the name of another reward, and there is none, got 'other'.",
        ),
        (
            [Reward("a", names_one_that_is_missing), Reward("correct", correct)],
            "reads_scores must be the name of another reward",
        ),
        ([Reward("size", size, gate="size")], "'size' reads 'size'"),
        (
            [
                Reward("free", correct),
                Reward("a", size, gate="b"),
                Reward("b", size, gate="c"),
                Reward("c", size, scale_by="b"),
            ],
            "no reward may depend on itself, and one does: 'b' reads 'c' reads 'b'",
        ),
    ],
)
def test_unknown_names_and_cycles_are_refused(rewards: list[Reward], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        score(rewards, ANSWERS, timeout=30.0)
    assert message in str(caught.value)


def test_a_config_is_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    entries = [
        {"use": f"{__name__}:correct"},
        {"use": f"{__name__}:size", "gate": "corect", "scale_by": "correct"},
    ]
    with pytest.raises(ConfigError, match=r"^\[\[rewards\]\]: gate must be the name of another"):
        build_terms(small_rollouts(tmp_path, rewards=entries))
    entries[1]["gate"] = "correct"
    built = build_terms(small_rollouts(tmp_path, rewards=entries)).rewards[1]
    assert (built.gate, built.scale_by) == ("correct", "correct")
