"""`Doctor`: findings of a run while it goes on; `diagnose`: those of a run that is on record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steelyard.doctor import answer_rules, run_rules, term_rules
from steelyard.doctor.facts import Facts
from steelyard.doctor.finding import Finding
from steelyard.doctor.observation import Memory, Observation, read_number
from steelyard.doctor.rule import Course, Rule
from steelyard.errors import StateError
from steelyard.spec.checks import is_finite, is_whole

# The most useful ones first: findings are listed in this order.
RULES: tuple[Rule, ...] = (
    term_rules.bound_broken,
    term_rules.no_gradient,
    term_rules.sum_beside_means,
    answer_rules.no_signal,
    answer_rules.reward_without_spread,
    answer_rules.saturated_at_the_start,
    answer_rules.truncated,
    answer_rules.reward_fails,
    run_rules.failed,
    run_rules.worse_than_untrained,
    run_rules.exploded,
    run_rules.not_finite,
    run_rules.overfits,
    answer_rules.entropy_collapsed,
    answer_rules.ratios_off,
    run_rules.clipped_at_most_steps,
    term_rules.no_response,
    term_rules.dominates,
    term_rules.fights,
    term_rules.brakes,
    term_rules.batch_too_small,
    term_rules.takes_the_time,
    term_rules.skipped_often,
    term_rules.small_share,
    answer_rules.nearly_constant_reward,
)
_NAMES = tuple(rule.name for rule in RULES)


class Doctor:
    """Reads the metrics of each step and says what is wrong with the run.

    Metrics that are missing make the rules silent that read them. Nothing is read but numbers that
    the caller has anyway.

    Args:
        facts: declared facts of the run. They may be replaced between steps, if the run changes.

    Example:
        >>> from steelyard.doctor.facts import Facts
        >>> doctor = Doctor(Facts(loss="cross_entropy"))
        >>> doctor.observe(0, {"held_out/loss": 2.0})
        []
        >>> [finding.rule for finding in doctor.observe(1, {"held_out/loss": 4.0})]
        ['worse than untrained']
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._step: int | None = None
        self._updated = False
        self._memory = {name: Memory() for name in _NAMES}
        self._courses: dict[str, dict[str, Course]] = {name: {} for name in _NAMES}

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Read the metrics of a step; return the findings that begin or end with it.

        A step that is not after the last one is passed over: a run that is resumed repeats steps.

        Args:
            step: number of the step.
            metrics: of the step, under the keys of `metrics.jsonl`; what is no number may be there.
        """
        if self._step is not None and step <= self._step:
            return []
        # A run that is first observed at a later step was updated before.
        updated = self._updated or (self._step is None and step > 0)
        observation = Observation(step, metrics, self.facts, updated)
        changed = []
        for rule in RULES:
            memory, courses = self._memory[rule.name], self._courses[rule.name]
            for subject, diagnosis in rule.judge(observation, memory):
                course = courses.get(subject)
                if course is None:
                    course = courses[subject] = Course()
                finding = course.judged(rule, subject, diagnosis, step)
                if finding is not None:
                    changed.append(finding)
        rate = read_number(metrics, "optim/learning_rate")
        self._step, self._updated = step, updated or rate is None or rate > 0
        return changed

    @property
    def findings(self) -> list[Finding]:
        """The findings that last, in the order of the rules, with the numbers of the last step."""
        return sorted(
            (
                course.finding
                for courses in self._courses.values()
                for course in courses.values()
                if course.finding
            ),
            key=lambda finding: (_NAMES.index(finding.rule), finding.subject),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state to save, without the facts."""
        return {
            "step": self._step,
            "updated": self._updated,
            "memory": {
                name: {key: list(numbers) for key, numbers in memory.lists.items()}
                for name, memory in self._memory.items()
                if memory.lists
            },
            "courses": [
                {"rule": name, "subject": subject, **course.state_dict()}
                for name, courses in sorted(self._courses.items())
                for subject, course in sorted(courses.items())
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; rules that no longer exist are left out.

        Raises:
            StateError: it is not that.
        """
        keys = ("step", "updated", "memory", "courses")
        if not isinstance(state, Mapping) or set(state) != set(keys):
            raise StateError(f"the state of a doctor must hold {', '.join(keys)}, got {state!r}.")
        step, updated, memory, courses = (state[key] for key in keys)
        if not (
            (step is None or is_whole(step, at_least=0))
            and isinstance(updated, bool)
            and _is_memory(memory)
            and isinstance(courses, list)
        ):
            raise StateError(f"the state of a doctor must be what state_dict gave, got {state!r}.")
        restored: dict[str, dict[str, Course]] = {name: {} for name in _NAMES}
        for entry in courses:
            if not isinstance(entry, Mapping) or not {"rule", "subject"} <= set(entry):
                raise StateError(f"the state of a rule must hold rule and subject, got {entry!r}.")
            rest = {key: entry[key] for key in entry if key not in ("rule", "subject")}
            if entry["rule"] in _NAMES:
                restored[entry["rule"]][str(entry["subject"])] = Course.from_state(rest)
        self._step, self._updated, self._courses = step, updated, restored
        self._memory = {
            name: Memory({key: list(numbers) for key, numbers in memory.get(name, {}).items()})
            for name in _NAMES
        }


def diagnose(facts: Facts, rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Findings of a run on record, those that have ended and those that last, in order of steps.

    Args:
        facts: declared facts of the run.
        rows: metrics of the steps, the lines of `metrics.jsonl`; a line without a whole number as
            `"step"` is the one after the line before.

    Example:
        >>> from steelyard.doctor.facts import Facts
        >>> rows = [{"held_out/loss": loss} for loss in (2.0, 4.0, 1.5)]
        >>> [(f.step, f.ended) for f in diagnose(Facts(loss="cross_entropy"), rows)]
        [(1, 2)]
    """
    doctor, ended, step = Doctor(facts), [], -1
    for row in rows:
        own = row.get("step")
        step = own if isinstance(own, int) and is_whole(own, at_least=0) else step + 1
        ended += [f for f in doctor.observe(step, row) if f.ended is not None]
    return sorted(
        [*ended, *doctor.findings],
        key=lambda finding: (finding.step, _NAMES.index(finding.rule), finding.subject),
    )


def _is_memory(memory: object) -> bool:
    return isinstance(memory, Mapping) and all(
        isinstance(lists, Mapping)
        and all(
            isinstance(numbers, list) and all(map(is_finite, numbers)) for numbers in lists.values()
        )
        for lists in memory.values()
    )
