"""The doctor as a whole: order, resumed runs, state, and metrics that may hold anything."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from steelyard.doctor.examination import RULES, Doctor, diagnose
from steelyard.doctor.facts import Facts, RewardFacts, TermFacts
from steelyard.doctor.finding import Finding
from steelyard.errors import StateError

from .series import answers_row, rules, term_row

FACTS = Facts(
    terms=(
        TermFacts("kl", "kl_to_reference", bound="at_most", restraint=True, reduction="mean"),
        TermFacts("own", weight=0.1, reduction="mean", smallest_batch=16),
    ),
    rewards=(RewardFacts("short", 1.0),),
    loss="cross_entropy",
    reduction="sum",
    advantage="grpo",
    batch_size=8,
    answers=16,
    grad_clip_norm=1.0,
)
ILL = {
    **term_row(value=0.9, bound=0.3, weight=2.0),
    **term_row("own", norm=999.0, cosine=-0.9, tokens=90.0),
    **answers_row(0.0, 0.0, silent=1.0, truncated=1.0, ratio=3.0),
    "optim/unclipped_grad_l2:mean": 9.0,
}


def test_every_rule_has_its_own_name() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_findings_are_in_the_order_of_the_rules_and_problems_are_among_them() -> None:
    doctor = Doctor(FACTS)
    for step in range(30):
        doctor.observe(step, ILL)
    assert [finding.rule for finding in doctor.findings] == [
        "bound broken",
        "no signal",
        "reward without spread",
        "truncated",
        "ratios off before any update",
        "clipped at most steps",
        "dominates",
        "fights the base loss",
        "batch too small",
    ]
    assert all(finding.ended is None for finding in doctor.findings)


def test_a_finding_is_returned_once_when_it_begins_and_once_when_it_ends() -> None:
    doctor = Doctor(FACTS)
    changes = [doctor.observe(step, ILL) for step in range(30)]
    changes += [doctor.observe(step, {**term_row(value=0.2, bound=0.3)}) for step in range(30, 40)]
    of_bound = [f for change in changes for f in change if f.rule == "bound broken"]
    assert [(f.step, f.ended) for f in of_bound] == [(14, None), (14, 34)]
    assert "bound broken" not in [finding.rule for finding in doctor.findings]


def test_steps_that_are_repeated_are_passed_over() -> None:
    doctor = Doctor(Facts(loss="cross_entropy"))
    doctor.observe(0, {"held_out/loss": 2.0})
    doctor.observe(5, {"held_out/loss": 2.0})
    assert doctor.observe(5, {"held_out/loss": 9.0}) == []
    assert doctor.observe(3, {"held_out/loss": 9.0}) == []
    assert len(doctor.observe(6, {"held_out/loss": 9.0})) == 1


def test_facts_may_be_replaced_while_the_run_goes_on() -> None:
    doctor = Doctor(Facts(terms=(TermFacts("own", smallest_batch=16),), batch_size=4))
    (begun,) = doctor.observe(0, term_row("own"))
    doctor.facts = Facts(terms=doctor.facts.terms, batch_size=32)
    (ended,) = doctor.observe(1, term_row("own"))
    assert (begun.rule, begun.step, ended.ended) == ("batch too small", 0, 1)


def test_lines_without_a_step_are_counted() -> None:
    rows: list[dict[str, Any]] = [{"step": 4}, {"held_out/loss": float("nan")}, {"step": "7"}]
    (finding,) = diagnose(Facts(), rows)
    assert (finding.rule, finding.step) == ("not finite", 5)


def test_warm_up_hides_nothing_and_claims_nothing() -> None:
    rows = [term_row("own", value=0.5, norm=0.0) | {"optim/learning_rate": 0.0} for _ in range(20)]
    assert rules(rows, Facts(terms=(TermFacts("own", weight=0.1),))) == []


# State.


def test_a_doctor_goes_on_from_its_state() -> None:
    rows = [ILL if step % 7 else term_row(value=0.1, bound=0.3) for step in range(40)]
    whole = Doctor(FACTS)
    expected = [whole.observe(step, row) for step, row in enumerate(rows)]
    for cut in (0, 1, 6, 15, 33):
        first, second = Doctor(FACTS), Doctor(FACTS)
        changes = [first.observe(step, rows[step]) for step in range(cut)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        changes += [second.observe(step, rows[step]) for step in range(cut, len(rows))]
        assert changes == expected
        assert second.findings == whole.findings
        assert second.state_dict() == whole.state_dict()


def test_the_state_is_not_shared() -> None:
    doctor, other = Doctor(FACTS), Doctor(FACTS)
    for step in range(9):
        doctor.observe(step, ILL)
    state = doctor.state_dict()
    kept = json.dumps(state)
    other.load_state_dict(state)
    for step in range(9, 20):
        doctor.observe(step, ILL)
        other.observe(step, ILL)
    assert json.dumps(state) == kept


def test_rules_that_no_longer_exist_are_left_out() -> None:
    doctor = Doctor(FACTS)
    doctor.observe(0, ILL)
    state = doctor.state_dict()
    state["courses"].append({"rule": "gone", "subject": "x", "window": [], "well": 0})
    doctor.load_state_dict(state)
    assert "gone" not in {finding.rule for finding in doctor.findings}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"step": 1.5},
        {"updated": "yes"},
        {"memory": []},
        {"memory": {"exploded": []}},
        {"memory": {"exploded": {"loss": 1.0}}},
        {"memory": {"exploded": {"loss": ["1"]}}},
        {"courses": {}},
        {"courses": [3]},
        {"courses": [{"rule": "exploded"}]},
        {"courses": [{"rule": "exploded", "subject": "x"}]},
        {"more": 1},
    ],
)
def test_other_states_are_errors_and_change_nothing(wrong: dict[str, Any]) -> None:
    doctor = Doctor(FACTS)
    doctor.observe(0, ILL)
    state = doctor.state_dict()
    with pytest.raises(StateError, match="must "):
        doctor.load_state_dict(state | wrong)
    assert doctor.state_dict() == state
    with pytest.raises(StateError, match="the state of a doctor must hold step, updated"):
        doctor.load_state_dict([])  # type: ignore[arg-type]  # a state from elsewhere


# Metrics that may hold anything.

NAMES = ("kl", "own", "a/b", "")
KEYS = sorted(
    {
        *ILL,
        "loss_total",
        "nll",
        "tokens",
        "seconds",
        "held_out/loss",
        "clip_fraction",
        "first_substep/ratio",
        "factors/base",
        "skipped/own",
        "skipped/own/reason",
        "skipped/kl",
        "rewards/short/failed",
        "rewards/short/seconds",
        "rewards/short/no_signal",
        "optim/learning_rate",
        "optim/grad_clip_norm",
        *(
            f"regularizers/{name}/{end}"
            for name in NAMES
            for end in (
                "contribution",
                "value",
                "weight",
                "bound",
                "violation",
                "progress",
                "grad_norm",
                "grad_norm_weighted",
                "grad_space",
                "duration",
            )
        ),
    }
)
NUMBERS = (
    st.floats()
    | st.sampled_from([0.0, 1.0, 0.3, -1.0, 1e99, -1e99, 1e100, 1e308, 5e-324])
    | st.integers()
    | st.just(10**400)
)
VALUES = NUMBERS | st.none() | st.booleans() | st.text(max_size=3) | st.just([1.0])
ROWS = st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=40), max_size=25)
# Rows that repeat make findings begin.
REPEATED = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(KEYS), NUMBERS, min_size=5), st.integers(1, 12)),
    max_size=4,
).map(lambda runs: [row for row, count in runs for _ in range(count)])


def observed(rows: list[dict[str, Any]], facts: Facts) -> tuple[list[list[Finding]], Doctor]:
    doctor = Doctor(facts)
    return [doctor.observe(step, row) for step, row in enumerate(rows)], doctor


@settings(deadline=None, max_examples=150)
@given(ROWS | REPEATED, st.sampled_from([Facts(), FACTS]))
def test_any_metrics_never_raise_and_findings_begin_before_they_end(
    rows: list[dict[str, Any]], facts: Facts
) -> None:
    changes, doctor = observed(rows, facts)
    begun: set[tuple[str, str, int]] = set()
    for step, change in enumerate(changes):
        for finding in change:
            key = finding.rule, finding.subject, finding.step
            if finding.ended is None:
                assert finding.step == step
                begun.add(key)
            else:
                assert finding.ended == step > finding.step
                begun.remove(key)
            assert finding.text
    assert begun == {(f.rule, f.subject, f.step) for f in doctor.findings}
    json.dumps(doctor.state_dict(), allow_nan=False)


@settings(deadline=None, max_examples=50)
@given(REPEATED, st.randoms())
def test_the_order_of_the_keys_does_not_matter(
    rows: list[dict[str, Any]], order: random.Random
) -> None:
    shuffled = [dict(order.sample(list(row.items()), len(row))) for row in rows]
    assert observed(rows, FACTS)[0] == observed(shuffled, FACTS)[0]


@settings(deadline=None, max_examples=50)
@given(REPEATED, st.integers(0, 30))
def test_a_cut_anywhere_changes_nothing(rows: list[dict[str, Any]], cut: int) -> None:
    expected, whole = observed(rows, FACTS)
    changes, first = observed(rows[:cut], FACTS)
    second = Doctor(FACTS)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    changes += [second.observe(step, row) for step, row in enumerate(rows)][cut:]
    assert changes == expected
    assert second.findings == whole.findings


def test_the_doctor_loads_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'jax', 'ray', 'tinker'} & set(sys.modules)"
    code = f"import sys, steelyard.doctor.examination; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
