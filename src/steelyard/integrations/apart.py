"""Terms of a composite that run apart: in threads, processes or as coroutines, with a timeout.

They run as the terms of a pipeline do, on copies of what they read; what comes back is a value,
to which its gradient is attached so that the caller's own backward pass finds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from steelyard.composition.call import Call, Settings
from steelyard.composition.part import Part
from steelyard.composition.term import Term
from steelyard.errors import GradientError
from steelyard.execution import Workers
from steelyard.gradients import LogProbs, flatten, tensors_in
from steelyard.integrations.inputs import Inputs
from steelyard.integrations.named import Reads
from steelyard.integrations.packing import (
    AsyncUnpack,
    Unpack,
    with_floats,
    with_precise_floats,
    without_floats,
)
from steelyard.integrations.reading import Reading, complain, differentiable, wide
from steelyard.spec import RegularizerSpec


def runs_apart(spec: RegularizerSpec) -> bool:
    """Whether the term must leave the caller's graph and thread."""
    return (
        spec.run_in not in ("auto", "inline")
        or spec.is_async
        or spec.timeout is not None
        or spec.gradient in ("numerical", "score")
    )


def read_apart(
    terms: Sequence[Term], inputs: Inputs, step: int, settings: Settings, workers: Workers
) -> tuple[list[Reading], dict[str, str]]:
    """The values of terms that run apart, and why those were dropped that failed.

    Raises:
        TermError: one failed that may not.
    """
    if not terms:
        return [], {}
    asked = [_asked(term, inputs) for term in terms]
    finite = settings.check_finite
    call = Call([each.part(step, check_finite=finite) for each in asked], settings)
    call.run(workers, SimpleQueue())
    if finite:
        call.check_gradients()
    readings = []
    for term, each, part in zip(terms, asked, call.parts, strict=True):
        if part.evaluation is None:
            continue
        if part.evaluation.method is None and differentiable(inputs):
            try:
                complain(term)
            except GradientError as error:
                part.fail(error)
                continue
        readings.append(each.reading(part))
    return readings, {p.term.name: p.skipped for p in call.parts if p.skipped is not None}


@dataclass(frozen=True)
class _Asked:
    """A term as a pipeline takes it, and the tensors that its gradients belong to."""

    term: Term
    data: Any
    logprobs: LogProbs
    given: Mapping[str, Any]

    def part(self, step: int, *, check_finite: bool) -> Part:
        """The term's part in a call."""
        with torch.inference_mode(mode=False):
            layout, flat = flatten(self.logprobs)
        return Part.of(
            self.term, step, self.data, layout, flat, self.given, check_finite=check_finite
        )

    def reading(self, part: Part) -> Reading:
        """What came of it: the value with its gradient."""
        told = part.evaluation
        assert told is not None  # noqa: S101 - for mypy: the caller has looked
        pairs: list[tuple[Tensor, Tensor | None]] = []
        if told.gradient is not None:
            both = (self.logprobs, part.question.layout.split(told.gradient))
            given, pulls = ([each] if isinstance(each, Tensor) else each for each in both)
            pairs += zip(given, pulls, strict=True)
        for need, found in told.beyond.items():
            pairs += zip(tensors_in(self.given[need]), found, strict=True)
        flat = part.question.flat
        value = torch.tensor(told.value, dtype=wide(flat.dtype), device=flat.device)
        kept = [(tensor, pull) for tensor, pull in pairs if pull is not None]
        if kept:
            tensors, gradients = zip(*kept, strict=True)
            value = _Attached.apply(value, gradients, *tensors)  # type: ignore[no-untyped-call]
        return Reading(
            part.term,
            part.weight,
            value,
            told.custom,
            told.method,
            told.duration,
            part.events,
            None if told.method is None else told.gradient_duration,
        )


def _asked(term: Term, inputs: Inputs) -> _Asked:
    fn = term.spec.fn
    if not isinstance(fn, Reads):
        given = {need: inputs[need] for need in term.spec.needs}
        return _differentiated(term, inputs["data"], inputs["logprobs"], given)
    if term.spec.gradient == "score":  # it reads the data and their log-probs, by whatever name
        (data, logprobs), extra = fn.arguments(inputs)
        return _Asked(_with(term, fn=partial(fn.fn, **extra)), data, logprobs, {})
    away = term.spec.run_in == "process"
    data, floats = without_floats(fn.arguments(inputs), away=away)
    kind = AsyncUnpack if term.spec.is_async else Unpack
    if not floats:
        return _Asked(_with(term, fn=kind(fn.fn), gradient="none"), data, [torch.empty(0)], {})
    fill = with_precise_floats if term.spec.gradient == "numerical" else with_floats
    # One vector holds them all; each is handed to the term as what it was.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in floats))
    alike = [tensor.to(dtype) for tensor in floats]
    return _Asked(_with(term, fn=kind(fn.fn, fill)), data, alike, {})


def _differentiated(term: Term, data: Any, logprobs: Any, given: Mapping[str, Any]) -> _Asked:
    """A term over `(data, logprobs)`, without a gradient that nobody could use."""
    unused = term.spec.gradient != "score" and not differentiable([logprobs, given])
    return _Asked(_with(term, gradient="none") if unused else term, data, logprobs, given)


def _with(term: Term, **fields: Any) -> Term:
    return Term(replace(term.spec, **fields), term.facts)


class _Attached(torch.autograd.Function):
    """A value whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream * gradient for gradient in ctx.saved_tensors)
