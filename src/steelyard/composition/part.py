"""A term's part in one call: what it is asked, what came of it, and what is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from steelyard.composition.events import TermEvents
from steelyard.composition.term import Place, Term
from steelyard.errors import TermError
from steelyard.gradients import Evaluation, Layout, Nest, Question
from steelyard.spec import title


@dataclass(eq=False)
class Part:
    """One term in one call.

    Attributes:
        term: the base loss or a regularizer.
        weight: its weight at this step.
        place: where it runs.
        question: what it is asked.
        events: what telemetry hears of it.
        evaluation: what came of it, once it has succeeded.
        skipped: why it was dropped, if it failed and may.
        begun: whether telemetry has heard that it begins.
    """

    term: Term
    weight: float
    place: Place
    question: Question
    events: TermEvents
    evaluation: Evaluation | None = None
    skipped: str | None = None
    begun: bool = False

    @classmethod
    def of(
        cls,
        term: Term,
        step: int,
        data: Any,
        layout: Layout,
        flat: Tensor,
        given: Mapping[str, Nest],
        *,
        check_finite: bool,
    ) -> Part:
        """The term at `step`, asked about these log-probs.

        Args:
            term: the base loss or a regularizer.
            step: the number of this step.
            data: what the term receives first.
            layout: the structure of the log-probs.
            flat: the log-probs.
            given: what there is beyond them, by need.
            check_finite: whether a value that is not finite is a failure.

        Raises:
            SpecError: a schedule yields a bad weight at this step.
        """
        spec, place, weight = term.spec, term.place(), term.spec.weight_at(step)
        question = Question(
            term.name,
            spec.call,
            spec.options,
            spec.gradient,
            data,
            layout,
            flat,
            check_finite,
            {need: given[need] for need in spec.needs},
        )
        return cls(term, weight, place, question, TermEvents(term, weight, place))

    def begin(self) -> None:
        """Say that it begins here and now, the first time."""
        if not self.begun:
            self.events.start()
            self.begun = True

    def succeed(self, evaluation: Evaluation) -> None:
        """Keep what came of it."""
        self.evaluation = evaluation
        self.term.facts.duration = evaluation.duration

    def fail(self, error: BaseException) -> None:
        """Note that the term is dropped, if it may be.

        Raises:
            TermError: it is the base loss, or its `on_error` is `"raise"`.
        """
        self.evaluation = None
        self.skipped = dropped(self.term, self.events, error)

    def report(self, grad_norm: float | None) -> None:
        """Tell of a success, and warn of a term that unexpectedly pulls nothing."""
        evaluation = self.evaluation
        if evaluation is None:
            return
        if evaluation.method is not None:
            self.events.gradient(evaluation.method, evaluation.gradient_duration)
        self.events.stop(evaluation, grad_norm)
        if evaluation.method is None and self.term.spec.gradient == "auto":
            self.term.warn_detached()


def dropped(term: Term, events: TermEvents, error: BaseException) -> str:
    """Why a term that failed is dropped, if it may be; telemetry hears of it either way.

    Raises:
        TermError: it is the base loss, or its `on_error` is `"raise"`.
    """
    failure = error
    if not isinstance(error, TermError) or error.term != term.name:
        message = f"{title(term.name)} failed: {type(error).__name__}: {error}"
        failure = TermError(message, term=term.name)
        failure.__cause__ = error
    events.exception(failure)
    if term.is_base or term.spec.on_error == "raise":
        raise failure
    return f"{type(failure).__name__}: {failure}"
