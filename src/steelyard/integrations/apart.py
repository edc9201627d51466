"""Terms of a composite that run apart: in threads, processes or as coroutines, with a timeout.

They run as the terms of a pipeline do, on copies of what they read; what comes back is a value,
to which its gradient is attached so that the caller's own backward pass finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from steelyard.composition.call import Call, Settings
from steelyard.composition.term import Term
from steelyard.execution import Workers
from steelyard.gradients import Evaluation, Layout, LogProbs, flatten, tensors_in
from steelyard.integrations.named import Inputs, Reads, fields_of
from steelyard.integrations.reading import Reading
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
    readings: list[Reading] = []
    skipped: dict[str, str] = {}
    named = [term for term in terms if isinstance(term.spec.fn, Reads)]
    plain = [term for term in terms if term not in named]
    for batch in (_as_it_is(plain, inputs), _packed(named, inputs)):
        if not batch.terms:
            continue
        layout, flat = flatten(batch.logprobs)
        call = Call(batch.terms, step, settings, batch.data, layout, flat, batch.given)
        call.run(workers, SimpleQueue())
        for part in call.parts:
            if part.evaluation is None:
                skipped[part.term.name] = part.skipped or ""
            else:
                value = batch.attached(part.evaluation, layout, flat)
                told = part.evaluation
                readings.append(
                    Reading(part.term, part.weight, value, told.custom, told.method, told.duration)
                )
    return readings, skipped


@dataclass(frozen=True)
class _Batch:
    """What a call of a pipeline takes, and the tensors that its gradients belong to."""

    terms: Sequence[Term]
    data: Any
    logprobs: LogProbs
    given: Mapping[str, Any] = field(default_factory=dict)

    def attached(self, evaluation: Evaluation, layout: Layout, flat: Tensor) -> Tensor:
        """The value of a term with its gradient."""
        pairs: list[tuple[Tensor, Tensor | None]] = []
        if evaluation.gradient is not None:
            pulls = tensors_in(layout.split(evaluation.gradient))
            pairs += zip(tensors_in(self.logprobs), pulls, strict=True)
        for need, found in evaluation.beyond.items():
            pairs += zip(tensors_in(self.given[need]), found, strict=True)
        value = torch.tensor(evaluation.value, device=flat.device)
        kept = [(tensor, pull) for tensor, pull in pairs if pull is not None]
        if not kept:
            return value
        tensors, gradients = zip(*kept, strict=True)
        attached: Tensor = _Attached.apply(value, gradients, *tensors)  # type: ignore[no-untyped-call]
        return attached


def _as_it_is(terms: Sequence[Term], inputs: Inputs) -> _Batch:
    """The batch of terms over `(data, logprobs)`."""
    needs = {need for term in terms for need in term.spec.needs}
    given = {need: inputs[need] for need in needs}
    return _Batch(terms, inputs.get("data"), inputs.get("logprobs", ()), given)


def _packed(terms: Sequence[Term], inputs: Inputs) -> _Batch:
    """The batch of terms over named inputs: the floats among these take the log-probs' place."""
    floats: dict[int, Tensor] = {}
    data = {}
    packed = []
    for term in terms:
        fn: Reads = term.spec.fn
        data[term.name] = _without(fn.arguments(inputs), floats)
        kind = _AsyncUnpack if term.spec.is_async else _Unpack
        packed.append(Term(replace(term.spec, fn=kind(fn.fn, term.name)), term.facts))
    if not floats:
        return _Batch(packed, data, [torch.empty(0)])
    # One vector holds them all; each is handed to the term as what it was.
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in floats.values()))
    return _Batch(packed, data, [tensor.to(dtype) for tensor in floats.values()])


@dataclass(frozen=True)
class _Slot:
    """Where a float tensor was: its place in the list, and its dtype."""

    index: int
    dtype: torch.dtype


def _without(value: Any, floats: dict[int, Tensor]) -> Any:
    """The arguments with a slot for each float tensor, which goes to `floats`."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        floats.setdefault(id(value), value)
        return _Slot(list(floats).index(id(value)), value.dtype)
    fields = fields_of(value)
    if fields is not None:
        return {name: _without(inner, floats) for name, inner in fields.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without(inner, floats) for inner in value)
    return value


def _filled(value: Any, floats: Sequence[Tensor]) -> Any:
    """The inverse of `_without`."""
    if isinstance(value, _Slot):
        return floats[value.index].to(value.dtype)
    if isinstance(value, Mapping):
        return {name: _filled(inner, floats) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(inner, floats) for inner in value)
    return value


@dataclass(frozen=True)
class _Unpack:
    """A function over named inputs, called as a term of a pipeline is."""

    fn: Callable[..., Any]
    term: str

    def __call__(self, data: Any, logprobs: Sequence[Tensor], **options: Any) -> Any:
        positional, extra = _filled(data[self.term], logprobs)
        return self.fn(*positional, **{**extra, **options})


class _AsyncUnpack(_Unpack):
    async def __call__(self, data: Any, logprobs: Sequence[Tensor], **options: Any) -> Any:
        return await super().__call__(data, logprobs, **options)


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
