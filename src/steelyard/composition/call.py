"""One call of a pipeline: run the terms, decide what failures mean, combine the gradients."""

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
from steelyard.composition.jobs import Job, evaluate_inline, job_for
from steelyard.composition.part import Part
from steelyard.composition.term import Term
from steelyard.errors import NonFiniteError, TermError
from steelyard.execution import Batch, Ticket, Workers
from steelyard.gradients import (
    Layout,
    Leaf,
    Nest,
    Pull,
    PullBeyond,
    Question,
    check_gradient,
    combine,
    combine_beyond,
)


@dataclass(frozen=True)
class Settings:
    """How a pipeline runs its terms."""

    track_grad_norms: bool
    parallel: bool
    timeout: float
    width: int
    check_finite: bool


class Call:
    """The terms that are due, on one batch.

    Args:
        terms: the base loss and the regularizers that run, in order.
        step: the number of this step.
        settings: how to run them.
        data: what the terms receive first.
        layout: the structure of the log-probs.
        flat: the log-probs.
        given: what there is beyond them, by need.

    Attributes:
        parts: the terms in this call.
        pull: their gradients, combined, once it has run.
        beyond: their gradients beyond log-probs, combined, once it has run.

    Raises:
        SpecError: a schedule yields a bad weight at this step.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        step: int,
        settings: Settings,
        data: Any,
        layout: Layout,
        flat: Tensor,
        given: Mapping[str, Nest],
    ) -> None:
        self._settings = settings
        self._layout, self._flat = layout, flat
        self.pull: Pull
        self.beyond: PullBeyond
        self.parts: list[Part] = []
        for term in terms:
            spec, place, weight = term.spec, term.place(), term.spec.weight_at(step)
            question = Question(
                term.name,
                spec.call,
                spec.options,
                spec.gradient,
                data,
                layout,
                flat,
                settings.check_finite,
                {need: given[need] for need in spec.needs},
            )
            events = TermEvents(term, weight, place)
            self.parts.append(Part(term, weight, place, question, events))

    def run(self, workers: Workers, stop: SimpleQueue[Ticket | None]) -> None:
        """Evaluate all terms: those that run apart first set going, then the inline ones.

        Raises:
            TermError: the base loss failed, or a term that may not.
        """
        jobs = self._jobs()
        with ExitStack() as stack:
            batch = None
            if jobs and self._settings.parallel:
                batch = stack.enter_context(self._batch(jobs, workers, stop))
            self._run_inline([part for part in self.parts if part.place == "inline"])
            if jobs:
                batch = batch or stack.enter_context(self._batch(jobs, workers, stop))
                self._gather(jobs, batch, workers)
        self._combine()
        for part in self.parts:
            part.report(self.norm_of(part.term))

    def norm_of(self, term: Term) -> float | None:
        """The norm of its gradient in its own space, if there is one and it is tracked."""
        norms = self.pull.norms if term.grad_space == "logprobs" else self.beyond.norms
        return norms.get(term.name)

    def _jobs(self) -> list[Job]:
        jobs = []
        for part in self.parts:
            if part.place != "inline":
                timeout = part.term.spec.timeout or self._settings.timeout
                try:
                    part.term.check_free()
                    jobs.append(job_for(part, part.place, timeout, self._settings.width))
                except TermError as error:
                    part.fail(error)
        return jobs

    def _batch(self, jobs: list[Job], workers: Workers, stop: SimpleQueue[Ticket | None]) -> Batch:
        silent = {job.part.term.name: job.part.events for job in jobs}

        def on_start(ticket: Ticket) -> None:
            if ticket.term in silent:
                silent.pop(ticket.term).start()

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
        left = {job.part.term.name: job for job in jobs}
        for ticket in batch.settled():
            job = left.get(ticket.term)
            if job is None or not (job.settled or ticket.error is not None):
                continue
            del left[ticket.term]
            try:
                job.part.succeed(job.result(ticket))
            except BaseException as error:  # noqa: BLE001 - also a sys.exit() in a thread
                self._call_off(job, workers)
                job.part.fail(error)

    def _call_off(self, job: Job, workers: Workers) -> None:
        """A ticket of the job failed: the others need not go on."""
        for ticket in job.tickets:
            if ticket.running and ticket.settled:
                job.part.term.facts.stuck = ticket
                if ticket.lane == "async":
                    workers.coroutines.give_up()
            ticket.cancel()

    def _run_inline(self, parts: Sequence[Part]) -> None:
        """Evaluate and differentiate the inline terms, one by one, on a leaf that they share.

        One backward pass over all of them would not be faster: there the gradients are added
        up one datum at a time, here as whole vectors.
        """
        if not parts:
            return
        with torch.inference_mode(mode=False), torch.enable_grad():
            leaf = Leaf.of(self._layout, self._flat)
            for part in parts:
                part.events.start()
                try:
                    evaluation = evaluate_inline(part.question, leaf)
                except Exception as error:  # noqa: BLE001 - whatever the term raised
                    part.fail(error)
                else:
                    part.succeed(evaluation)

    def _combine(self) -> None:
        """Combine the gradients; without those that are not finite, if these may fail."""
        self._pull()
        # The total shows what no term may have, at the cost of one look for all of them.
        if self._settings.check_finite and not self._is_finite():
            for part in self.parts:
                try:
                    for gradient in part.evaluation.gradients if part.evaluation else ():
                        check_gradient(part.term.name, gradient)
                except NonFiniteError as error:
                    part.fail(error)
            self._pull()

    def _is_finite(self) -> bool:
        beyond = (t for ts in self.beyond.totals.values() for t in ts if t is not None)
        return math.isfinite(self.pull.total_norm) and all(
            math.isfinite(total.sum().item()) for total in beyond
        )

    def _pull(self) -> None:
        tracked = self._settings.track_grad_norms
        done = {p.term.name: (p, p.evaluation) for p in self.parts if p.evaluation is not None}
        weights = {name: part.weight for name, (part, _) in done.items()}
        beyond = {name: e.beyond for name, (_, e) in done.items() if e.beyond}
        self.beyond = combine_beyond(beyond, weights, tracked=tracked)
        gradients = {name: e.gradient for name, (_, e) in done.items() if e.gradient is not None}
        aside = {name for name, (part, _) in done.items() if part.term.grad_space != "logprobs"}
        self.pull = combine(gradients, weights, self._flat, tracked=tracked, aside=aside)
