"""Decide whether a term runs inline or offloaded, and submit and gather the offloaded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from steelyard.composition.terms import Term, TermResult
from steelyard.execution.executor import Batch, Executor, Ticket
from steelyard.execution.random_state import Turn
from steelyard.gradients.estimators import check_count
from steelyard.gradients.isolated import IsolatedCall, ValueAndGradient
from steelyard.gradients.layout import mapped, tensors_in

# Submitting work to a thread and joining it costs about 0.1 ms, and terms made of tensor
# operations gain nothing from threads, so a term has to take much longer than that.
CHEAP = 5e-3


def executor_for(term: Term) -> str:
    """Place where a term runs in this call: `"inline"` or the name of an executor.

    `"auto"` is the event loop for an async term. Any other term runs in a thread, and inline
    once its last call took less than `CHEAP` seconds. A term with a timeout of its own stays in
    a thread, since an inline call cannot be interrupted, and so does a term with a numerical
    gradient, which takes many calls.
    """
    spec, duration = term.spec, term.statistics.duration
    if spec.run_in != "auto":
        return spec.run_in
    if spec.is_async:
        return "async"
    cheap = duration is not None and duration < CHEAP
    if cheap and spec.timeout is None and spec.gradient != "numerical":
        return "inline"
    return "thread"


@dataclass(eq=False)
class Job:
    """An offloaded term: one ticket, or several for a numerical gradient."""

    result: TermResult
    call: IsolatedCall
    executor: Executor
    tickets: Sequence[Ticket]

    @property
    def settled(self) -> bool:
        """Whether every ticket is settled."""
        return all(ticket.settled for ticket in self.tickets)

    def evaluation(self, last: Ticket) -> ValueAndGradient:
        """Result of the term, after `last` was settled; raises the error it ended with."""
        last.result()
        first, *rest = self.tickets
        evaluation: ValueAndGradient = first.result()
        if rest:
            begun = [t.started for t in self.tickets if t.started is not None]
            ended = [t.ended for t in self.tickets if t.ended is not None]
            slopes = torch.cat([ticket.result() for ticket in rest])
            evaluation = self.call.with_slopes(evaluation, slopes, max(ended) - min(begun))
        if evaluation.gradient is not None and evaluation.gradient.device != self.call.flat.device:
            evaluation = replace(evaluation, gradient=evaluation.gradient.to(self.call.flat.device))
        if evaluation.extra:
            device = self.call.flat.device
            evaluation = replace(
                evaluation, extra=mapped(evaluation.extra, lambda gradient: gradient.to(device))
            )
        return evaluation

    def cancel(self) -> None:
        """Cancel the remaining tickets after one of them failed."""
        for ticket in self.tickets:
            if ticket.running and ticket.settled:
                self.result.term.statistics.stuck = ticket
                self.executor.abandon()
            ticket.cancel()


def job_for(
    result: TermResult, call: IsolatedCall, executor: Executor, timeout: float, width: int
) -> Job:
    """Build the tickets that evaluate a term; a numerical gradient is split over `width` of them.

    Raises:
        TermBusyError: a call of the term that timed out is still running.
        GradientError: a numerical gradient would take too many evaluations.
    """
    term, size = result.term, call.flat.numel()
    term.check_free()

    def ticket(fn: Callable[..., Any], *args: int, reply_bytes: int) -> Ticket:
        seconds = term.spec.timeout or timeout
        return Ticket(
            term.name,
            result.executor,
            fn,
            args,
            seconds,
            reply_bytes=reply_bytes,
            shared=shared,
            resources=term.spec.resources,
            turn=turn() if result.takes_turns else None,
            may_skip=term.spec.on_error == "raise" and not term.is_base,
        )

    def turn() -> Turn | None:
        if result.executor == "async":  # coroutines of a loop never run at the same moment
            return Turn(group=executor)
        return Turn() if result.executor == "thread" else None  # a worker makes one call at a time

    shared = (call.data, call.flat, *call.extra.values())
    reply = call.flat.nbytes
    if call.extra:
        reply += sum(x.nbytes for x in tensors_in(call.extra))
    tickets = [ticket(call.arun if executor.awaits else call.run, reply_bytes=reply)]
    if call.gradient == "numerical":
        check_count(term.name, size)
        slopes = call.aslopes if executor.awaits else call.slopes
        pieces = 1 if executor.awaits else min(width, size)
        edges = [round(i * size / pieces) for i in range(pieces + 1)]
        tickets += [
            ticket(slopes, start, stop, reply_bytes=8 * (stop - start))
            for start, stop in pairwise(edges)
        ]
    return Job(result, call, executor, tickets)


def gather(
    jobs: Sequence[Job],
    batch: Batch,
    succeed: Callable[[TermResult, ValueAndGradient], object],
    fail: Callable[[TermResult, BaseException], object],
) -> None:
    """Wait for the jobs; call `succeed` or `fail` for each as soon as it ends.

    Raises:
        Cancelled: another thread cancelled the batch.
    """
    left = {job.result.term.name: job for job in jobs}
    for ticket in batch.settled():
        job = left.get(ticket.term)
        if job is None or not (job.settled or ticket.error is not None):
            continue
        del left[ticket.term]
        try:
            evaluation = job.evaluation(ticket)
        except BaseException as error:  # noqa: BLE001 - also a sys.exit() in a thread
            job.cancel()
            fail(job.result, error)
        else:
            succeed(job.result, evaluation)
