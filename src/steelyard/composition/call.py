"""One call of a pipeline: run the terms, decide what failures mean, combine the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from steelyard.composition.fusing import Fused, evaluate_together, groups_of, joined
from steelyard.composition.jobs import Job, evaluate_inline, job_for
from steelyard.composition.part import Part
from steelyard.composition.term import Term
from steelyard.errors import NonFiniteError, TermError
from steelyard.execution import Batch, Ticket, Workers
from steelyard.gradients import (
    Leaf,
    Pull,
    PullBeyond,
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
        parts: the base loss and the regularizers that run, in order.
        settings: how to run them.

    Attributes:
        parts: the terms in this call.
        fused: the terms that were computed together.
        pull: their gradients, combined, once they are.
        beyond: their gradients beyond log-probs, combined, once they are.
    """

    def __init__(self, parts: Sequence[Part], settings: Settings) -> None:
        self._settings = settings
        self.parts = parts
        self.fused: list[Fused] = []
        self.pull: Pull
        self.beyond: PullBeyond

    def run(self, workers: Workers, stop: SimpleQueue[Ticket | None]) -> None:
        """Evaluate all terms: those that run apart first set going, then the inline ones.

        Raises:
            TermError: the base loss failed, or a term that may not.
        """
        groups = groups_of(self.parts, tracked=self._settings.track_grad_norms)
        grouped = [part for group in groups for part in group]
        alone = [part for part in self.parts if part not in grouped]
        jobs = self._jobs(alone)
        with ExitStack() as stack:
            batch = None
            if jobs and self._settings.parallel:
                batch = stack.enter_context(self._batch(jobs, workers, stop))
            self._run_inline([part for part in alone if part.place == "inline"])
            for group in groups:
                self._run_together(group)
            if jobs:
                batch = batch or stack.enter_context(self._batch(jobs, workers, stop))
                self._gather(jobs, batch, workers)

    def combine(self) -> None:
        """Combine the gradients, all of one layout, and tell what came of the terms.

        Those that are not finite are left out, if their terms may fail.

        Raises:
            TermError: one is not, and may not.
        """
        self._pull()
        # The total shows what no term may have, at the cost of one look for all of them.
        if self._settings.check_finite and not self._is_finite():
            self._run_inline([part for fused in self.fused for part in fused.parts])
            self.fused = []
            self.check_gradients()
            self._pull()
        for part in self.parts:
            part.report(self.norm_of(part.term))

    def check_gradients(self) -> None:
        """Drop the terms with a gradient that is not finite.

        Raises:
            TermError: one may not be dropped.
        """
        for part in self.parts:
            try:
                for gradient in part.evaluation.gradients if part.evaluation else ():
                    check_gradient(part.term.name, gradient)
            except NonFiniteError as error:
                part.fail(error)

    def norm_of(self, term: Term) -> float | None:
        """The norm of its gradient in its own space, if there is one and it is tracked."""
        norms = self.pull.norms if term.grad_space == "logprobs" else self.beyond.norms
        return norms.get(term.name)

    def _jobs(self, parts: Sequence[Part]) -> list[Job]:
        jobs = []
        for part in parts:
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
            leaves: dict[int, Leaf] = {}
            for part in parts:
                layout, flat = part.question.layout, part.question.flat
                if id(flat) not in leaves:
                    leaves[id(flat)] = Leaf.of(layout, flat)
                part.begin()
                try:
                    evaluation = evaluate_inline(part.question, leaves[id(flat)])
                except Exception as error:  # noqa: BLE001 - whatever the term raised
                    part.fail(error)
                else:
                    part.succeed(evaluation)

    def _run_together(self, group: Sequence[Part]) -> None:
        """Evaluate a group of terms at once; one by one, if something is wrong with it."""
        for part in group:
            part.begin()
        with torch.inference_mode(mode=False), torch.enable_grad():
            fused = evaluate_together(group, tracked=self._settings.track_grad_norms)
        if fused is None:
            self._run_inline(group)
            return
        self.fused.append(fused)
        for part, evaluation in zip(group, fused.evaluations, strict=True):
            part.succeed(evaluation)

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
        own = combine_beyond(beyond, weights, tracked=tracked)
        self.beyond = joined([own, *(fused.pull for fused in self.fused)]) if self.fused else own
        gradients = {name: e.gradient for name, (_, e) in done.items() if e.gradient is not None}
        aside = {name for name, (part, _) in done.items() if part.term.grad_space != "logprobs"}
        like = self.parts[0].question.flat
        self.pull = combine(gradients, weights, like, tracked=tracked, aside=aside)
