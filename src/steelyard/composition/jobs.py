"""From a term to tickets, and from what came of them to an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

from steelyard.composition.part import Part
from steelyard.execution import Lane, Ticket
from steelyard.gradients import (
    Evaluation,
    Leaf,
    Question,
    Trial,
    aevaluate,
    aslopes,
    check_count,
    evaluate,
    evaluate_coroutine,
    mapped,
    slopes,
    slopes_coroutine,
    tensors_in,
)


@dataclass(eq=False)
class Job:
    """A term that runs apart: one ticket as a rule, several for a numerical gradient."""

    part: Part
    tickets: list[Ticket]

    @property
    def settled(self) -> bool:
        """Whether every ticket is."""
        return all(ticket.settled for ticket in self.tickets)

    def result(self, last: Ticket) -> Evaluation:
        """What came of a job when `last` was settled, or the error that one ended with."""
        last.result()
        evaluation: Evaluation = self.tickets[0].result()
        if len(self.tickets) > 1:
            pieces = torch.cat([ticket.result() for ticket in self.tickets[1:]])
            evaluation = with_slopes(self.part.question, evaluation, pieces, self._seconds())
        device = self.part.question.flat.device
        gradient = evaluation.gradient
        if gradient is not None:
            evaluation = replace(evaluation, gradient=gradient.to(device))
        if evaluation.beyond:
            beyond = mapped(evaluation.beyond, lambda gradient: gradient.to(device))
            evaluation = replace(evaluation, beyond=beyond)
        return evaluation

    def _seconds(self) -> float:
        begun = [t.started for t in self.tickets if t.started is not None]
        ended = [t.ended for t in self.tickets if t.ended is not None]
        return max(ended) - min(begun)


def job_for(part: Part, lane: Lane, timeout: float, width: int) -> Job:
    """The tickets that evaluate a term in `lane`; a numerical gradient spreads over `width`.

    Raises:
        GradientError: a numerical gradient would take too many evaluations.
    """
    term, question = part.term, part.question
    size = question.flat.numel()
    sent = question
    if lane == "process":
        beyond = mapped(question.beyond, lambda t: t.detach().cpu().requires_grad_(t.requires_grad))
        sent = replace(question, flat=question.flat.cpu(), beyond=beyond)
    first: Callable[..., Any]
    rest: Callable[..., Any]
    if lane == "async":
        first, rest = aevaluate, aslopes
    elif term.spec.is_async:
        first, rest = evaluate_coroutine, slopes_coroutine
    else:
        first, rest = evaluate, slopes

    def ticket(fn: Callable[..., Any], *args: int, reply_bytes: int) -> Ticket:
        return Ticket(term.name, lane, fn, (sent, *args), timeout, reply_bytes=reply_bytes)

    reply = size * question.flat.element_size()
    reply += sum(tensor.nbytes for tensor in tensors_in(question.beyond))
    tickets = [ticket(first, reply_bytes=reply)]
    if term.spec.gradient == "numerical":
        check_count(term.name, size)
        pieces = 1 if lane == "async" else min(width, size)
        edges = [round(i * size / pieces) for i in range(pieces + 1)]
        tickets += [
            ticket(rest, start, stop, reply_bytes=8 * (stop - start))
            for start, stop in pairwise(edges)
        ]
    return Job(part, tickets)


def with_slopes(
    question: Question, evaluation: Evaluation, pieces: torch.Tensor, seconds: float
) -> Evaluation:
    """An evaluation with the numerical gradient that was computed beside it."""
    return replace(
        evaluation,
        gradient=pieces.to(question.flat),
        method="numerical",
        duration=seconds,
        gradient_duration=seconds,
    )


def evaluate_inline(question: Question, leaf: Leaf) -> Evaluation:
    """The term's value and gradient, here and now, on a leaf that inline terms share."""
    if question.gradient != "numerical":
        return _evaluate_on(question, leaf)
    check_count(question.term, question.flat.numel())
    began = perf_counter()
    evaluation = _evaluate_on(question, leaf)
    pieces = slopes(question, 0, question.flat.numel())
    return with_slopes(question, evaluation, pieces, perf_counter() - began)


def _evaluate_on(question: Question, leaf: Leaf) -> Evaluation:
    trial = Trial(question, leaf)
    return trial.finish(trial.call())
