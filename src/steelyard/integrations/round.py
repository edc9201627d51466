"""The terms of one call of a composite, read: apart, together, or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from steelyard.composition import DetachedTermWarning, Pipeline
from steelyard.composition.part import dropped
from steelyard.errors import NonFiniteError
from steelyard.gradients import Pull
from steelyard.gradients.returned import check_finite
from steelyard.integrations.apart import read_apart, runs_apart
from steelyard.integrations.fusing import Together, groups_of, read_together
from steelyard.integrations.inputs import Inputs
from steelyard.integrations.reading import Reading, Turn, read_inline
from steelyard.integrations.weighed import Weighed


@dataclass(frozen=True, eq=False)
class Round:
    """What came of the terms that were due.

    Attributes:
        readings: those that ran, in order.
        skipped: those that failed, and why.
        groups: what was computed together.
    """

    readings: Sequence[Reading]
    skipped: dict[str, str]
    groups: Sequence[Together]

    @property
    def pull(self) -> Pull | None:
        """Norms and cosines, if they came with the values."""
        return self.groups[0].pull if self.groups else None


def read_all(
    pipeline: Pipeline, inputs: Inputs, step: int, targets: Sequence[Tensor], *, with_base: bool
) -> Round:
    """Read the terms that are due at `step`, and drop those that fail and may.

    Args:
        pipeline: holds the terms.
        inputs: what they read, by name.
        step: the number of this step.
        targets: what norms are wanted with respect to; none if they are not.
        with_base: whether the base loss may be computed together with terms.

    Raises:
        SpecError: a schedule yields a bad weight at this step.
        TermError: the base loss failed, or a term that may not.
    """
    due, finite = pipeline.due(step), pipeline.settings.check_finite
    apart = [term for term in due if runs_apart(term.spec)]
    found, skipped = read_apart(apart, inputs, step, pipeline.settings, pipeline.workers)
    by_name = {reading.term.name: reading for reading in found}
    turns = [Turn.of(term, step) for term in due if term not in apart]
    groups = []
    for group in groups_of([t for t in turns if with_base or not t.term.is_base], inputs):
        # A group tells its own norms alone, by the logits: no cosine with a term outside of it.
        all_of_it = len(group.turns) == len(due) and group.reads_only(targets)
        if targets and not all_of_it:
            continue
        together = read_together(group, inputs, check_finite=finite, tracked=bool(targets))
        if together is not None:
            groups.append(together)
            by_name |= {reading.term.name: reading for reading in together.readings}
    for turn in turns:
        name = turn.term.name
        if name in by_name:
            continue
        try:
            by_name[name] = read_inline(turn, inputs)
        except DetachedTermWarning:  # somebody makes errors of warnings
            raise
        except Exception as error:  # noqa: BLE001 - whatever the term raised
            skipped[name] = dropped(turn.term, turn.events, error)
    readings = [by_name[term.name] for term in due if term.name in by_name]
    return Round(_finite(readings, skipped) if finite else readings, skipped, groups)


def _finite(readings: Sequence[Reading], skipped: dict[str, str]) -> list[Reading]:
    numbers = Weighed(readings).numbers
    kept = []
    for reading in readings:
        name = reading.term.name
        try:
            check_finite(name, numbers[name][0])
        except NonFiniteError as error:
            assert reading.events is not None  # noqa: S101 - for mypy: outside a compiled function
            skipped[name] = dropped(reading.term, reading.events, error)
        else:
            kept.append(reading)
    return kept
