"""Length penalties: by hand, by TRL, and their gradients against sums over all answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.rewards.other_rewards import get_soft_overlong_punishment

from steelyard import RegularizerSpec
from steelyard.regularizers import (
    OverlongPenalty,
    RelativeLength,
    TruncatedImportanceSampling,
)

from .checks import plain, tinkered
from .enumeration import Answer, Policy, expectation

POLICY, SAMPLING = (Policy(seed=seed, longest=3, ends=True) for seed in (4, 5))
ON_AND_OFF = pytest.mark.parametrize(
    "sampling", [POLICY, SAMPLING], ids=["on policy", "off policy"]
)


def rows_of(lengths: Sequence[int]) -> list[Tensor]:
    return [torch.full((length,), -1.0) for length in lengths]


def off_policy(term: Any) -> TruncatedImportanceSampling:
    return TruncatedImportanceSampling(regularizer=term, level="sequence", high=None)


def is_right(answer: Answer) -> bool:
    return len(answer) != 2


def fields(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [{"group": 0, "reward": float(is_right(answer))} for answer in answers]


# Beyond a limit.


def test_the_overlong_penalty_agrees_with_trl() -> None:
    # TRL 1.16.0.
    lengths = range(1, 14)
    reward = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    penalties, metrics = OverlongPenalty(max_length=10, buffer=4).compute([], rows_of(lengths))
    expected = [-each for each in reward([[0] * length for length in lengths])]
    assert penalties.tolist() == pytest.approx(expected)
    assert metrics == {"length": 7.0, "overlong": 3 / 13}


def test_a_buffer_of_the_whole_length_is_linear() -> None:
    penalties, _ = OverlongPenalty(max_length=4, buffer=4).compute([], rows_of([1, 2, 4, 8]))
    assert penalties.tolist() == [0.25, 0.5, 1.0, 1.0]


def test_tokens_of_weight_zero_have_no_length() -> None:
    data = [plain(weights=[0.0, 0.0, 1.0])]
    penalties, _ = OverlongPenalty(max_length=4, buffer=4).compute(data, rows_of([3]))
    assert penalties.tolist() == [0.25]


@pytest.mark.parametrize("make", [plain, tinkered])
def test_only_right_answers_are_penalised(make: Any) -> None:
    data = [make(reward=[value]) for value in (1.0, 0.0, 0.25)]
    term = OverlongPenalty(max_length=4, buffer=4, correct="reward")
    assert term.compute(data, rows_of([2, 2, 2]))[0].tolist() == [0.5, 0.0, 0.0]
    low = OverlongPenalty(max_length=4, buffer=4, correct="reward", threshold=0.25)
    assert low.compute(data, rows_of([2, 2, 2]))[0].tolist() == [0.5, 0.0, 0.5]


@ON_AND_OFF
@pytest.mark.parametrize("correct", [None, "reward"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_gradient_is_that_of_the_expected_penalty(
    count: int, correct: str | None, sampling: Policy
) -> None:
    term: Any = OverlongPenalty(max_length=3, buffer=3, correct=correct)
    term = term if sampling is POLICY else off_policy(term)
    _, found = expectation(term, POLICY, sampling, fields, count=count)
    wanted = POLICY.expected(
        lambda answer: len(answer) / 3 * (is_right(answer) if correct else True)
    )
    torch.testing.assert_close(found, POLICY.gradient(wanted), rtol=1e-9, atol=1e-12)


# Relative to the group.


@pytest.mark.parametrize(
    ("scale", "size"), [("mean", 20.0), ("range", 20.0), ("std", math.sqrt(200 / 3))]
)
def test_relative_lengths_by_hand(scale: Any, size: float) -> None:
    data = [plain(group=label) for label in ("a", "b", "a", "b", "a", "c")]
    rows = rows_of([10, 5, 20, 5, 30, 7])
    penalties, metrics = RelativeLength(scale=scale).compute(data, rows)
    expected = [-10 / size, 0.0, 0.0, 0.0, 10 / size, 0.0]  # b has equal lengths, c is alone
    assert (penalties * 6 / 5).tolist() == pytest.approx(expected)
    assert metrics == pytest.approx({"length": 77 / 6, "compared": 1.0})


def test_only_right_answers_are_compared() -> None:
    data = [plain(group=0, reward=value) for value in (1.0, 0.0, 1.0, 0.0)]
    term = RelativeLength(correct="reward")
    penalties, metrics = term.compute(data, rows_of([10, 1000, 30, 1]))
    assert (penalties * 4 / 3).tolist() == [-0.5, 0.0, 0.5, 0.0]
    assert metrics["compared"] == 0.5
    wrong = [plain(group=0, reward=0.0)] * 2
    assert term.compute(wrong, rows_of([1, 2]))[0].tolist() == [0.0, 0.0]


def test_an_empty_answer_alone_has_no_penalty() -> None:
    data = [plain(group=0, weights=[0.0]), plain(group=1)]
    penalties, _ = RelativeLength().compute(data, rows_of([1, 3]))
    assert penalties.tolist() == [0.0, 0.0]


def relative(scale: str, lengths: list[int], right: list[bool]) -> float:
    """Penalty of the first answer of a group, by hand."""
    compared = [length for length, each in zip(lengths, right, strict=True) if each]
    if not right[0] or len(set(compared)) == 1:
        return 0.0
    mean = sum(compared) / len(compared)
    variance = sum((length - mean) ** 2 for length in compared) / len(compared)
    spread = max(compared) - min(compared)
    size = {"mean": mean, "range": spread, "std": math.sqrt(variance)}[scale]
    return (lengths[0] - mean) / size


@ON_AND_OFF
@pytest.mark.parametrize("correct", [None, "reward"])
@pytest.mark.parametrize("scale", ["mean", "range", "std"])
def test_the_gradient_is_that_of_the_penalty_against_a_fixed_group(
    scale: Any, correct: str | None, sampling: Policy
) -> None:
    """One answer from the policy, the others of its group of three from the sampling policy."""
    term: Any = RelativeLength(scale=scale, correct=correct)
    term = term if sampling is POLICY else off_policy(term)
    value, found = expectation(term, POLICY, sampling, fields, count=3)

    def penalty(answer: Answer) -> float:
        total = 0.0
        for others in itertools.product(sampling.answers, repeat=2):
            group = [answer, *others]
            right = [correct is None or is_right(each) for each in group]
            probability = math.prod(sampling.probability(each) for each in others)
            total += probability * relative(scale, [len(each) for each in group], right)
        return total

    wanted = POLICY.gradient(POLICY.expected(penalty))
    assert wanted.norm() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    assert value == pytest.approx(0.0, abs=1e-12)


def test_several_groups_are_averaged() -> None:
    """Two prompts of two answers each: the mean of their gradients, whatever the batch."""

    def two_groups(answers: Sequence[Answer]) -> list[dict[str, Any]]:
        return [{"group": index // 2} for index in range(len(answers))]

    _, four = expectation(RelativeLength(), POLICY, POLICY, two_groups, count=4)
    _, two = expectation(RelativeLength(), POLICY, POLICY, two_groups, count=2)
    torch.testing.assert_close(four, two, rtol=1e-9, atol=1e-12)


def test_they_use_the_score_function() -> None:
    for term in (OverlongPenalty(max_length=2, buffer=1), RelativeLength()):
        assert RegularizerSpec(term, 1.0).gradient == "score"
