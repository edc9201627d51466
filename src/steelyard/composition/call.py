"""One call of a pipeline: run the terms, decide what failures mean, join the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from steelyard.composition.events import TermEvents
from steelyard.composition.jobs import Job, job_for, slopes_inline
from steelyard.composition.term import Place, Term
from steelyard.errors import NonFiniteError, TermError
from steelyard.execution import Batch, Cancelled, Ticket, Workers
from steelyard.gradients import (
    Evaluation,
    Layout,
    Leaf,
    Pull,
    Question,
    Trial,
    check_gradient,
    combine,
)


@dataclass(frozen=True)
class Settings:
    """How a pipeline runs its terms."""

    track_grad_norms: bool
    parallel: bool
    timeout: float
    width: int
    check_finite: bool


@dataclass(frozen=True)
class Results:
    """What came of the terms.

    Attributes:
        evaluations: by name, those that succeeded.
        pull: their gradients, combined.
        skipped: reasons, by name, of those that failed and may.
    """

    evaluations: Mapping[str, Evaluation]
    pull: Pull
    skipped: Mapping[str, str]


class Call:
    """The terms that are due, on one batch.

    Args:
        terms: the base loss and the regularizers that run, in order.
        weights: by name, at this step.
        settings: how to run them.
        data: what the terms receive first.
        layout: the structure of the log-probs.
        flat: the log-probs.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        weights: Mapping[str, float],
        settings: Settings,
        data: Any,
        layout: Layout,
        flat: Tensor,
    ) -> None:
        self._terms = terms
        self._settings = settings
        self._weights = weights
        self._layout, self._flat = layout, flat
        self._places: dict[str, Place] = {}
        self._events: dict[str, TermEvents] = {}
        self._questions: dict[str, Question] = {}
        self._inline: list[Term] = []
        self._apart: list[Term] = []
        self._evaluations: dict[str, Evaluation] = {}
        self._skipped: dict[str, str] = {}
        for term in terms:
            spec, place = term.spec, term.place()
            self._places[term.name] = place
            self._events[term.name] = TermEvents(term, weights[term.name], place)
            self._questions[term.name] = Question(
                term.name,
                spec.call,
                spec.options,
                spec.gradient,
                data,
                layout,
                flat,
                settings.check_finite,
            )
            (self._inline if place == "inline" else self._apart).append(term)

    def run(self, workers: Workers, stop: SimpleQueue[Ticket | None]) -> Results:
        """Evaluate all terms: those that run apart first set going, then the inline ones.

        Raises:
            TermError: the base loss failed, or a term that may not.
        """
        jobs = self._jobs()
        with ExitStack() as stack:
            batch = None
            if jobs and self._settings.parallel:
                batch = stack.enter_context(self._batch(jobs, workers, stop))
            if self._inline:
                self._run_inline()
            if jobs:
                batch = batch or stack.enter_context(self._batch(jobs, workers, stop))
                self._gather(jobs, batch, workers)
        pull = self._combine()
        for term in self._terms:
            if term.name in self._evaluations:
                self._report(term, self._evaluations[term.name], pull.norms.get(term.name))
        return Results(self._evaluations, pull, self._skipped)

    def _jobs(self) -> list[Job]:
        jobs = []
        for term in self._apart:
            try:
                term.check_free()
                jobs.append(
                    job_for(
                        term,
                        self._questions[term.name],
                        self._places[term.name],  # type: ignore[arg-type]  # not inline, so a lane
                        term.spec.timeout or self._settings.timeout,
                        self._settings.width,
                    )
                )
            except TermError as error:
                self._failed(term, error)
        return jobs

    def _batch(self, jobs: list[Job], workers: Workers, stop: SimpleQueue[Ticket | None]) -> Batch:
        begun: set[str] = set()

        def on_start(ticket: Ticket) -> None:
            if ticket.term not in begun:
                begun.add(ticket.term)
                self._events[ticket.term].start()

        width = self._settings.width
        return Batch(
            [ticket for job in jobs for ticket in job.tickets],
            workers.executors,
            {"thread": width, "process": width},
            in_turn=not self._settings.parallel,
            on_start=on_start,
            events=stop,
        )

    def _gather(self, jobs: list[Job], batch: Batch, workers: Workers) -> None:
        left = {job.term.name: job for job in jobs}
        for ticket in batch.settled():
            job = left.get(ticket.term)
            if job is None or not (job.settled or ticket.error is not None):
                continue
            del left[ticket.term]
            try:
                self._succeeded(job.term, job.result(ticket))
            except Exception as error:  # noqa: BLE001 - whatever the term raised
                self._call_off(job, workers)
                self._failed(job.term, error)

    def _call_off(self, job: Job, workers: Workers) -> None:
        """A ticket of the job failed: the others need not go on."""
        for ticket in job.tickets:
            if ticket.running and ticket.settled:
                job.term.facts.stuck = ticket
                if ticket.lane == "async":
                    workers.coroutines.give_up()
            ticket.cancel()

    def _run_inline(self) -> None:
        """Evaluate and differentiate the inline terms, one by one, on a leaf that they share.

        One backward pass over all of them would not be faster: there the gradients of every
        datum are added up one datum at a time, here as one vector.
        """
        with torch.inference_mode(mode=False), torch.enable_grad():
            leaf = Leaf.of(self._layout, self._flat)
            for term in self._inline:
                question = self._questions[term.name]
                self._events[term.name].start()
                try:
                    trial = Trial(question, leaf)
                    evaluation = trial.finish(question.call(trial.logprobs))
                    if question.gradient == "numerical":
                        evaluation = slopes_inline(question, evaluation)
                except Exception as error:  # noqa: BLE001 - whatever the term raised
                    self._failed(term, error)
                else:
                    self._succeeded(term, evaluation)

    def _combine(self) -> Pull:
        """The gradients, combined; without those that are not finite, if these may fail."""
        pull = self._pull()
        # The total shows what no term may have, at the cost of one look for all of them.
        if self._settings.check_finite and not math.isfinite(pull.total_norm):
            for term in self._terms:
                gradient = self._gradients().get(term.name)
                try:
                    if gradient is not None:
                        check_gradient(term.name, gradient)
                except NonFiniteError as error:
                    del self._evaluations[term.name]
                    self._failed(term, error)
            pull = self._pull()
        return pull

    def _pull(self) -> Pull:
        tracked = self._settings.track_grad_norms
        return combine(self._gradients(), self._weights, self._flat, tracked=tracked)

    def _gradients(self) -> dict[str, Tensor]:
        """By name, in the order of the specs."""
        found = ((t.name, self._evaluations.get(t.name)) for t in self._terms)
        return {n: e.gradient for n, e in found if e is not None and e.gradient is not None}

    def _report(self, term: Term, evaluation: Evaluation, norm: float | None) -> None:
        events = self._events[term.name]
        if evaluation.method is not None:
            events.gradient(evaluation.method, evaluation.gradient_duration)
        events.stop(evaluation, norm)
        if evaluation.method is None and term.spec.gradient == "auto":
            term.warn_detached()

    def _succeeded(self, term: Term, evaluation: Evaluation) -> None:
        self._evaluations[term.name] = evaluation
        term.facts.duration = evaluation.duration

    def _failed(self, term: Term, error: BaseException) -> None:
        """Raise what a failure means for the call, or note that the term is skipped."""
        if isinstance(error, Cancelled):
            raise error
        failure = error
        if not isinstance(error, TermError):
            what = "the base loss" if term.is_base else f"regularizer {term.name!r}"
            failure = TermError(f"{what} failed: {type(error).__name__}: {error}", term=term.name)
            failure.__cause__ = error
        self._events[term.name].exception(failure)
        if term.is_base or term.spec.on_error == "raise":
            raise failure
        self._skipped[term.name] = f"{type(failure).__name__}: {failure}"
