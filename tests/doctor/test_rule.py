"""Hysteresis: when a finding begins, is kept, and ends."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from steelyard.doctor.finding import Finding
from steelyard.doctor.observation import Memory, Observation
from steelyard.doctor.rule import Course, Diagnosis, Judgements, Rule, rule
from steelyard.errors import StateError


def judged(judgements: str, begin: tuple[int, int] = (3, 4), end: int = 2) -> list[Finding]:
    """Findings that begin or end; `x` is a step that is not well, `.` one that is."""
    made = a_rule(begin, end)
    course = Course()
    changes = [
        course.judged(made, "it", diagnosis(step) if letter == "x" else None, step)
        for step, letter in enumerate(judgements)
    ]
    return [change for change in changes if change is not None]


def a_rule(begin: tuple[int, int], end: int) -> Rule:
    @rule("ill", "warning", when="never", cure="none", begin=begin, end=end)
    def ill(now: Observation, memory: Memory) -> Judgements:
        yield from ()

    return ill


def diagnosis(step: int) -> Diagnosis:
    return Diagnosis("it is ill", f"at step {step}", "rest")


@pytest.mark.parametrize(
    ("judgements", "begins", "ends"),
    [
        ("xx.x", [3], []),
        ("xx..x..x", [], []),
        ("xxx", [2], []),
        ("xxx.x.x.", [2], []),
        ("xxx..", [2], [4]),
        ("xxx..xxx..", [2, 7], [4, 9]),
        ("xxx..xx", [2], [4]),  # what was before the end does not count again
        ("", [], []),
    ],
)
def test_it_begins_after_three_of_four_and_ends_after_two(
    judgements: str, begins: list[int], ends: list[int]
) -> None:
    changes = judged(judgements)
    assert [change.step for change in changes if change.ended is None] == begins
    assert [change.ended for change in changes if change.ended is not None] == ends


@given(st.text("x.", max_size=60), st.integers(1, 5), st.integers(0, 5), st.integers(1, 5))
def test_findings_begin_and_end_in_turn(judgements: str, count: int, more: int, end: int) -> None:
    changes = judged(judgements, (count, count + more), end)
    for number, change in enumerate(changes):
        assert (change.ended is None) == (number % 2 == 0)
        if change.ended is not None:
            assert change.step == changes[number - 1].step < change.ended


def test_while_it_lasts_its_numbers_are_the_last_ones() -> None:
    made, course = a_rule((1, 1), 1), Course()
    course.judged(made, "it", diagnosis(3), 3)
    assert course.judged(made, "it", diagnosis(4), 4) is None
    assert course.finding is not None
    assert (course.finding.step, course.finding.evidence) == (3, "at step 4")


def test_a_diagnosis_may_have_a_severity_of_its_own() -> None:
    made, course = a_rule((1, 1), 1), Course()
    finding = course.judged(made, "it", Diagnosis("a", "b", "c", severity="problem"), 0)
    assert finding is not None
    assert finding.severity == "problem"
    assert judged("xxx")[0].severity == "warning"


@given(st.text("x.", max_size=30), st.text("x.", max_size=30))
def test_a_course_goes_on_from_its_state(before: str, after: str) -> None:
    made, course = a_rule((3, 5), 2), Course()
    for step, letter in enumerate(before):
        course.judged(made, "it", diagnosis(step) if letter == "x" else None, step)
    restored = Course.from_state(json.loads(json.dumps(course.state_dict())))
    for step, letter in enumerate(after, len(before)):
        verdict = diagnosis(step) if letter == "x" else None
        assert course.judged(made, "it", verdict, step) == restored.judged(
            made, "it", verdict, step
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"well": "no"},
        {"window": True},
        {"window": [1]},
        {"finding": {}},
        {"more": 1},
    ],
)
def test_other_states_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="must hold"):
        Course.from_state(Course().state_dict() | wrong)
    with pytest.raises(StateError, match="the state of a rule must hold window, well, finding"):
        Course.from_state([])  # type: ignore[arg-type]  # a state from elsewhere


def test_a_memory_keeps_short_lists() -> None:
    memory = Memory({})
    assert [list(memory.last("a", number, 2)) for number in (1.0, 2.0, 3.0)] == [
        [1.0],
        [1.0, 2.0],
        [2.0, 3.0],
    ]
    assert memory.last("a", 4.0, 1) == [4.0]
    assert [list(memory.first("b", number, 2)) for number in (1.0, 2.0, 3.0)] == [
        [1.0],
        [1.0, 2.0],
        [1.0, 2.0],
    ]
    assert memory.mean_of_first("c", 1.0) == 1.0
    assert memory.mean_of_first("c", 4.0) == 2.5
    assert (memory.holds("c"), memory.holds("d")) == (True, False)
