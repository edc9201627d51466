"""Rules about on-policy runs: rows in which each is true, and rows that only look like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steelyard.doctor.facts import Facts, RewardFacts

from .series import Row, answers_row, found, one, rules

FACTS = Facts(advantage="grpo", answers=32, batch_size=32, loss="importance_sampling")


# No signal.


def test_groups_without_signal_are_said_after_five_steps() -> None:
    finding = one([answers_row(silent=0.9)] * 8, FACTS)
    assert (finding.rule, finding.subject, finding.severity, finding.step) == (
        "no signal",
        "rollouts",
        "warning",
        4,
    )
    assert finding.evidence == "90 % of the groups over 5 steps up to step 7"


def test_no_group_with_a_signal_is_a_problem() -> None:
    assert one([answers_row(silent=1.0)] * 8, FACTS).severity == "problem"


def test_a_reward_that_has_risen_to_the_top_is_no_problem() -> None:
    rows = [answers_row(0.1, 0.3, silent=0.1)] * 3 + [answers_row(0.98, 0.14, silent=1.0)] * 8
    finding = one(rows, FACTS)
    assert finding.severity == "information"
    assert finding.cause == "the reward has risen from 0.1 to 0.98: little is left to learn"
    # A partial credit: not zeros and ones, but it is known that 1 is the highest value.
    rows = [answers_row(0.1, 0.2, silent=0.1)] * 3 + [answers_row(0.95, 0.1, silent=1.0)] * 8
    facts = replace(
        FACTS, rewards=(RewardFacts.of_config({"use": "reasoning_gym", "name": "short"}),)
    )
    assert one(rows, facts).cause.endswith(": little is left to learn")


def test_a_reward_that_has_risen_half_the_way_has_more_to_learn() -> None:
    rows = [answers_row(0.0, 0.0, silent=0.6)] + [answers_row(0.5, 0.5, silent=0.9)] * 8
    finding = found(rows, FACTS)[-1]
    assert (finding.rule, finding.severity) == ("no signal", "warning")
    assert finding.cause == (
        "the reward has risen from 0 to 0.5 of 1: the answers to most prompts have become alike"
    )
    assert "harder" not in finding.cure


def test_how_much_is_left_is_not_said_where_the_highest_value_is_not_known() -> None:
    rows = [answers_row(-9.0, 1.0, silent=0.1)] * 3 + [answers_row(-2.0, 0.3, silent=0.9)] * 8
    finding = one(rows, FACTS)
    assert (finding.severity, finding.cause) == (
        "information",
        "the reward has risen from -9 to -2",
    )
    assert finding.cure == "take harder prompts, or stop, if that is near its highest value"


def test_the_highest_value_of_a_sum_is_that_of_its_rewards() -> None:
    row = {
        **answers_row(0.5, 0.5, silent=0.9),
        **answers_row(0.5, 0.5, silent=0.9, name="json", weight=3.0),
        "rollouts/reward": 2.0,
    }
    first = {**row, "rollouts/reward": 0.1, "rollouts/reward_std": 0.2}
    cause = one([first, *[row] * 8], FACTS).cause
    assert cause.startswith("the reward has risen from 0.1 to 2 of 4: the answers to most prompts")
    row["rewards/json/mean"] = 7.0
    assert one([first, *[row] * 8], FACTS).cause == "the reward has risen from 0.1 to 2"


@pytest.mark.parametrize(
    "silences",
    [
        pytest.param([0.69] * 20, id="69 %"),
        pytest.param([1.0, 1.0, 0.5, 0.25, 1.0] * 4, id="few groups: noise"),
        pytest.param([1.0] * 4, id="four steps"),
    ],
)
def test_some_groups_without_signal_are_silent(silences: list[float]) -> None:
    assert rules([answers_row(silent=silent) for silent in silences], FACTS) == []


def test_between_its_thresholds_no_signal_neither_begins_nor_ends() -> None:
    rows = [answers_row(silent=silent) for silent in [0.9] * 5 + [0.7] * 10]
    assert one(rows, FACTS).ended is None
    (finding,) = found([*rows, *[answers_row(silent=0.2)] * 5], FACTS)
    assert finding.ended == 16


def test_each_of_several_rewards_has_its_own_signal() -> None:
    row = {
        **answers_row(name="short"),
        **answers_row(name="json"),
        "rewards/json/no_signal": 1.0,
        "rewards/short/no_signal": 0.1,
    }
    assert one([row] * 5, FACTS).subject == "rewards/json"
    assert "no signal" not in rules([row] * 5, replace(FACTS, advantage="gdpo"))
    assert rules([(answers_row() | {"rewards/short/no_signal": 1.0})] * 5, FACTS) == []


def test_groups_count_where_the_reward_is_not_known() -> None:
    assert rules([{"rollouts/no_signal": 0.9}] * 5, FACTS) == ["no signal"]


# Reward without spread.


def test_a_reward_that_is_the_same_for_all_of_the_first_answers_is_said() -> None:
    finding = one([answers_row(0.0, 0.0)], FACTS)
    assert (finding.rule, finding.subject, finding.severity, finding.step) == (
        "reward without spread",
        "rewards/short",
        "problem",
        0,
    )
    assert finding.evidence == "0 for the first 32 answers, up to step 0"


def test_a_reward_whose_gate_is_closed_has_that_as_its_cause() -> None:
    row = answers_row(0.0, 0.0, name="json") | answers_row(0.0, 0.0, name="short")
    entry = {"use": "length", "name": "short", "gate": "json", "scale_by": "json"}
    facts = replace(FACTS, rewards=(RewardFacts("json"), RewardFacts.of_config(entry)))
    causes = {finding.subject: finding.cause for finding in found([row], facts)}
    assert causes == {
        "rewards/json": "",
        "rewards/short": "it is 0 where reward 'json' is, and that is 0 for all of them",
    }
    # Where the gate is open for some, it is the reward's own doing.
    opened = answers_row(0.5, 0.5, name="json") | answers_row(0.0, 0.0, name="short")
    assert one([opened], facts).cause == ""


def test_beside_another_reward_it_is_a_warning() -> None:
    row = answers_row(0.0, 0.0, name="json") | answers_row(name="short")
    assert one([row], FACTS).severity == "warning"


def test_it_ends_with_the_first_answer_that_differs() -> None:
    rows = [answers_row(0.0, 0.0), answers_row(0.03, 0.17), answers_row(0.0, 0.0)]
    (finding,) = found(rows, FACTS)
    assert (finding.step, finding.ended) == (0, 1)


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        pytest.param([answers_row(0.0, 0.0)] * 3, replace(FACTS, answers=8), id="24 answers"),
        pytest.param([answers_row(0.0, 0.0, weight=0.0)], FACTS, id="a weight of 0"),
        pytest.param([answers_row(0.0, 0.0)], replace(FACTS, answers=None), id="how many?"),
        pytest.param(
            [answers_row(0.4, 0.5)] * 3 + [answers_row(1.0, 0.0)] * 3,
            FACTS,
            id="solved in the end",
        ),
        pytest.param(
            [answers_row(0.1 * step, 0.0) for step in range(9)],
            replace(FACTS, answers=1),
            id="one answer a step, each another",
        ),
    ],
)
def test_a_reward_with_spread_is_silent(rows: list[Row], facts: Facts) -> None:
    assert rules(rows, facts) == []


def test_the_first_answers_of_a_resumed_run_are_not_the_first() -> None:
    assert rules([answers_row(0.0, 0.0)] * 3, FACTS, start=50) == []
    assert rules([answers_row(0.94, 0.24)] * 3, FACTS, start=50) == []
    assert rules([answers_row(entropy=0.01)] * 9, FACTS, start=50) == []


# Saturated at the start.


def test_a_reward_of_zeros_and_ones_that_begins_at_94_percent_is_said() -> None:
    finding = one([answers_row(0.94, 0.24)] * 3, FACTS)
    assert (finding.rule, finding.severity, finding.step) == (
        "saturated at the start",
        "warning",
        0,
    )
    assert finding.evidence == "0.94 of 1 over the first 32 answers"


def test_a_declared_highest_value_counts() -> None:
    facts = replace(FACTS, rewards=(RewardFacts("short", highest=10.0),))
    assert rules([answers_row(9.5, 1.0)], facts) == ["saturated at the start"]
    assert rules([answers_row(5.0, 1.0)], facts) == []


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        pytest.param([answers_row(0.94, 0.01)], FACTS, id="a scale that is not known"),
        pytest.param([answers_row(0.5, 0.51)] + [answers_row(0.95, 0.22)] * 9, FACTS, id="later"),
        pytest.param([answers_row(1.0, 0.0)], replace(FACTS, answers=8), id="8 answers"),
        pytest.param([answers_row(0.94, 0.24, weight=0.0)], FACTS, id="a weight of 0"),
    ],
)
def test_a_reward_that_leaves_room_is_silent(rows: list[Row], facts: Facts) -> None:
    assert rules(rows, facts) == []


def test_it_ends_when_the_reward_falls() -> None:
    (finding,) = found([answers_row(0.94, 0.24), answers_row(0.6, 0.49)], FACTS)
    assert finding.ended == 1


# Truncated.


def test_answers_that_are_cut_at_three_steps_are_said() -> None:
    finding = one([answers_row(truncated=1.0, silent=0.7)] * 4, FACTS)
    assert (finding.rule, finding.severity, finding.step) == ("truncated", "warning", 2)
    assert finding.evidence == "100 % at step 3, 40 tokens on average"
    finding = one([{"rollouts/truncated": 0.6}] * 3)
    assert (finding.evidence, finding.severity) == ("60 % at step 2", "warning")


def test_answers_that_are_cut_and_still_told_apart_are_information() -> None:
    assert one([answers_row(truncated=1.0, silent=0.2)] * 4, FACTS).severity == "information"


def test_half_of_the_answers_or_one_step_of_them_are_silent() -> None:
    assert rules([answers_row(truncated=0.5)] * 9, FACTS) == []
    rows = [answers_row(truncated=0.9), answers_row(truncated=0.1)] * 5
    assert rules(rows, FACTS) == []


# Reward fails.


def failing(failed: float, *, mean: float | None = 0.5) -> Row:
    row = answers_row() | {"rewards/short/failed": failed}
    if mean is None:
        del row["rewards/short/mean"], row["rewards/short/std"]
    return row


def test_a_reward_that_always_fails_is_a_problem_at_the_second_step() -> None:
    finding = one([failing(32.0, mean=None)] * 3, FACTS)
    assert (finding.rule, finding.severity, finding.step) == ("reward fails", "problem", 1)
    assert finding.evidence == "32 of 32 answers at step 2"
    assert one([failing(4.0, mean=None)] * 3).evidence == "4 of 4 answers at step 2"


def test_a_reward_that_fails_for_many_answers_is_a_warning() -> None:
    finding = one([failing(10.0)] * 3, FACTS)
    assert (finding.what, finding.severity) == ("reward 'short' fails for many answers", "warning")


def test_failures_that_are_few_or_once_are_silent() -> None:
    assert rules([failing(3.0)] * 9, FACTS) == []
    assert rules([failing(32.0, mean=None), answers_row()] * 4, FACTS) == []
    assert rules([failing(10.0)] * 9) == []  # of how many?


# Entropy.


def collapsing(reward: float = 0.2, std: float = 0.3) -> list[Row]:
    entropies = [2.0, 1.8, 1.9] + [0.1] * 8
    return [answers_row(reward, std, entropy=entropy) for entropy in entropies]


def test_an_entropy_below_a_tenth_of_its_start_has_collapsed() -> None:
    finding = one(collapsing(), FACTS)
    assert (finding.rule, finding.severity, finding.step) == ("entropy collapsed", "warning", 7)
    assert finding.evidence == "1.9 → 0.1 at step 10"


def test_an_entropy_that_fell_by_three_quarters_is_silent() -> None:
    rows = [answers_row(entropy=2.0 if step < 3 else 0.5) for step in range(30)]
    assert rules(rows, FACTS) == []


def test_a_task_that_is_solved_needs_no_entropy() -> None:
    solved = [answers_row(0.3, 0.46)] * 3 + collapsing(0.97, 0.17)[3:]
    assert rules(solved, FACTS) == []


# Ratios.


def test_a_ratio_off_one_before_any_update_is_a_problem() -> None:
    rows = [answers_row(ratio=0.8, clip_fraction=0.3)] * 4
    finding = one(rows, FACTS)
    assert (finding.rule, finding.severity, finding.step) == (
        "ratios off before any update",
        "problem",
        2,
    )
    assert finding.evidence == "mean ratio 0.8, 30 % of the tokens outside the clip at step 3"


@pytest.mark.parametrize("key", ["ratio", "clip_fraction"])
def test_either_number_is_enough(key: str) -> None:
    more: dict[str, Any] = {f"first_substep/{key}": 0.3}
    assert rules([answers_row(**more)] * 4, replace(FACTS, substeps=4)) == [
        "ratios off before any update"
    ]


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        pytest.param({"ratio": 1.2, "clip_fraction": 0.2}, replace(FACTS, substeps=4), id="later"),
        pytest.param({"ratio": 1.01, "clip_fraction": 0.01}, FACTS, id="numerics"),
        pytest.param({"ratio": 0.5}, Facts(), id="not known to be on policy"),
        pytest.param({}, FACTS, id="no ratio"),
    ],
)
def test_ratios_after_updates_and_of_numerics_are_silent(row: Row, facts: Facts) -> None:
    assert rules([answers_row(**row)] * 9, facts) == []


# Nearly constant rewards.


def test_a_nearly_constant_reward_under_gdpo_is_information() -> None:
    gdpo = replace(FACTS, advantage="gdpo")
    finding = one([answers_row(10.0, 0.1)] * 6, gdpo)
    assert (finding.rule, finding.severity, finding.step) == (
        "nearly constant reward",
        "information",
        4,
    )
    assert rules([(answers_row() | {"rewards/short/no_signal": 0.9})] * 6, gdpo) == [
        "nearly constant reward"
    ]


def test_a_nearly_constant_reward_elsewhere_or_without_weight_is_silent() -> None:
    gdpo = replace(FACTS, advantage="gdpo")
    # Of a reward that is equal in all groups nothing is left to be scaled.
    dead = answers_row(0.0, 0.0) | {"rewards/short/no_signal": 1.0}
    by_group = answers_row(0.5, 0.5) | {"rewards/short/no_signal": 1.0}
    assert "nearly constant reward" not in rules([dead] * 6, gdpo)
    assert "nearly constant reward" not in rules([by_group] * 6, gdpo)
    assert rules([answers_row(10.0, 0.1)] * 6, FACTS) == []
    assert rules([answers_row(10.0, 0.1, weight=0.0)] * 6, gdpo) == []
    assert rules([answers_row(10.0, 5.0)] * 6, gdpo) == []
