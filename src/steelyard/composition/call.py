"""One call of a pipeline: run the terms, decide what failures mean, join the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from steelyard.composition.events import TermEvents
from steelyard.composition.jobs import Job, job_for, slopes_inline
from steelyard.composition.term import Place, Term
from steelyard.errors import TermError
from steelyard.execution import Batch, Cancelled, Ticket, Workers
from steelyard.gradients import (
    Evaluation,
    Layout,
    Leaf,
    Question,
    Trial,
    check_gradient,
    no_path,
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
        joint: the weighted sum of the gradients that were taken in one backward pass.
        skipped: reasons, by name, of those that failed and may.
    """

    evaluations: Mapping[str, Evaluation]
    joint: Tensor | None
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
            self._events[term.name] = TermEvents(
                term, weights[term.name], place, tracked=settings.track_grad_norms
            )
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
            joint = self._run_inline()
            if jobs:
                batch = batch or stack.enter_context(self._batch(jobs, workers, stop))
                self._gather(jobs, batch, workers)
        return Results(self._evaluations, joint, self._skipped)

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

    def _run_inline(self) -> Tensor | None:
        """Evaluate the inline terms on one shared leaf; their joint gradient if not tracked."""
        leaf: Leaf | None = None
        waiting: list[tuple[Term, Tensor]] = []
        with torch.inference_mode(mode=False), torch.enable_grad():
            for term in self._inline:
                question, events = self._questions[term.name], self._events[term.name]
                events.start()
                try:
                    if leaf is None:
                        leaf = Leaf.of(self._layout, self._flat)
                    trial = Trial(question, leaf)
                    evaluation = trial.finish(
                        question.call(trial.logprobs), defer=not self._settings.track_grad_norms
                    )
                    if question.gradient == "numerical":
                        evaluation = slopes_inline(question, evaluation)
                    if evaluation.loss is not None:
                        evaluation = self._look_for_path(term, leaf, evaluation)
                except Exception as error:  # noqa: BLE001 - whatever the term raised
                    self._failed(term, error)
                    continue
                loss = evaluation.loss
                self._succeeded(term, replace(evaluation, loss=None))
                if loss is not None:
                    waiting.append((term, loss))
            return None if leaf is None or not waiting else self._differentiate(leaf, waiting)

    def _look_for_path(self, term: Term, leaf: Leaf, evaluation: Evaluation) -> Evaluation:
        """Whether a loss that waits for the joint pass depends on the log-probs at all.

        Walking the graph costs as much as a small term, so a term that has shown a path once
        is believed from then on.
        """
        loss = evaluation.loss
        if term.facts.has_path or (loss is not None and leaf.reached_by(loss)):
            term.facts.has_path = True
            return evaluation
        if term.spec.gradient == "autograd":
            raise no_path(term.name)
        return replace(evaluation, loss=None, method=None)

    def _differentiate(self, leaf: Leaf, waiting: list[tuple[Term, Tensor]]) -> Tensor | None:
        """The gradient of the weighted sum of several losses, in one backward pass."""
        pulling = [(t, loss) for t, loss in waiting if self._weights[t.name] > 0]
        if not pulling:
            return None
        began = perf_counter()
        try:
            joint = leaf.gradient_of_sum(
                [loss for _, loss in pulling], [self._weights[t.name] for t, _ in pulling]
            )
            if joint is not None and self._settings.check_finite:
                check_gradient("", joint)
        except Exception:  # noqa: BLE001 - the culprit is looked for, and named, below
            joint = self._one_by_one(leaf, pulling)
        seconds = perf_counter() - began
        for term, _ in waiting:
            if term.name in self._evaluations:
                self._events[term.name].gradient("autograd", seconds)
        return joint

    def _one_by_one(self, leaf: Leaf, pulling: list[tuple[Term, Tensor]]) -> Tensor | None:
        """The same sum when the joint pass failed: the terms at fault are named and dropped."""
        total: Tensor | None = None
        for term, loss in pulling:
            try:
                gradient = leaf.gradient_of(loss)
                if gradient is not None and self._settings.check_finite:
                    check_gradient(term.name, gradient)
            except Exception as error:  # noqa: BLE001 - whatever the term's backward raised
                del self._evaluations[term.name]
                self._failed(term, error)
                continue
            if gradient is not None:
                pull = gradient * self._weights[term.name]
                total = pull if total is None else total + pull
        return total

    def _succeeded(self, term: Term, evaluation: Evaluation) -> None:
        self._evaluations[term.name] = evaluation
        term.facts.duration = evaluation.duration
        events = self._events[term.name]
        if evaluation.gradient is not None and evaluation.method is not None:
            events.gradient(evaluation.method, evaluation.gradient_duration)
        events.stop(evaluation)
        if evaluation.method is None and term.spec.gradient == "auto":
            term.warn_detached()

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
