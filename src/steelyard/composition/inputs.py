"""What the terms of a call read, by name, and what they are differentiated with respect to.

Terms stay in the graph of the inputs, or they run on copies of them and their gradient is
attached to the value afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import combinations
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from steelyard.composition.input_names import Named, Reads
from steelyard.composition.terms import Group, Term, TermResult
from steelyard.gradients import (
    Evaluation,
    IsolatedCall,
    Joint,
    Layout,
    LogProbs,
    Nest,
    Row,
    differentiate,
    filled,
    flatten,
    leaf_over,
    leaves_of,
    mapped,
    split_gradient,
    tensors_in,
)
from steelyard.penalties.from_logits import LogitCall, fusable
from steelyard.spec import RegularizerSpec

LOGPROBS = "logprobs"


class Inputs:
    """The inputs of one call, in the caller's graph.

    Args:
        named: what the terms read, by name.
        space: what norms are with respect to, in a word.
        targets: the tensors that this is; none if norms are not wanted.
        fuse_base: whether the base loss may be computed together with terms.

    Attributes:
        inline_by_default: whether terms run inline unless they have to leave the graph, since they
            may close over something that is trained as well.
    """

    inline_by_default = True
    _flat: tuple[Layout, Tensor] | None = None

    def __init__(
        self,
        named: Mapping[str, Any],
        space: str,
        targets: Sequence[Tensor] = (),
        *,
        fuse_base: bool = True,
    ) -> None:
        self.named, self.main_space = named, space
        self._targets, self._fuse_base = targets, fuse_base
        self._logit_calls: dict[str, LogitCall | None] = {}
        self._copied: dict[str, tuple[Layout, LogProbs, Mapping[str, Any]]] = {}

    @cached_property
    def source(self) -> str | None:
        """What terms should depend on, in words; None if nothing requires a gradient."""
        return "what it reads" if requiring_grad(self.named) else None

    def in_graph(self, term: Term) -> bool:
        """Whether a term stays in the graph when it runs inline."""
        return runs_in_graph(term.spec)

    def space(self, term: Term) -> tuple[str, ...]:  # noqa: ARG002 - all terms have the same
        """The names of what the term's norm is with respect to."""
        return (self.main_space,)

    def call(self, term: Term) -> Any:
        """Call a term; gives what it returned."""
        return call_term(term.spec, self.named)

    def differentiate(self, result: TermResult) -> None:
        """Keep the graph for the caller's backward pass; find the gradient if norms are wanted."""
        assert result.value is not None  # noqa: S101 - for mypy: the caller has set it
        result.value = widened(result.term.spec, result.value)
        result.method = "autograd" if result.value.requires_grad else None
        if not self._targets or result.method is None:
            return
        began, dtype = perf_counter(), _wide(result.value.dtype)
        row = [
            None if gradient is None else gradient.to_dense().to(dtype)
            for gradient in differentiate(result.value, self._targets)
        ]
        result.gradients = {self.main_space: row}
        if result.gradient_duration is None:
            result.gradient_duration = perf_counter() - began

    def isolated(self, term: Term, *, check_finite: bool) -> IsolatedCall:
        """The same call on copies of the inputs that require a gradient."""
        spec, fn, gradient = term.spec, term.spec.fn, term.spec.gradient
        call, extra = spec.call, {need: self.named[need] for need in spec.needs}
        floats: LogProbs
        if not isinstance(fn, Reads):
            data, floats = self.named["data"], self.named["logprobs"]
            if gradient != "score" and not self._flat and not requiring_grad([floats, extra]):
                gradient = "none"
        elif gradient == "score":  # it reads the data and their log-probs, by whatever name
            (data, floats), keywords = fn.arguments(self.named)
            call = partial(fn.fn, **keywords)
        else:
            data, floats = _take_floats(fn.arguments(self.named))
            call = _WithFloats(fn.fn, precise=gradient == "numerical")
            if floats:
                # One vector holds them all; each is handed to the term as what it was.
                dtype = reduce(torch.promote_types, (x.dtype for x in floats))
                floats = [x.to(dtype) for x in floats]
            else:
                gradient, floats = "none", [torch.empty(0)]
        layout, flat = self._flat or flatten(floats)
        self._copied[term.name] = layout, floats, extra
        return IsolatedCall(
            term.name,
            call,
            spec.options,
            gradient,
            data,
            layout,
            flat,
            check_finite,
            extra,
            spec.is_async,
        )

    def accept(self, result: TermResult, evaluation: Evaluation) -> None:
        """Attach the gradient of an isolated call to its value, for the caller's backward pass."""
        layout, floats, extra = self._copied.pop(result.term.name)
        inputs, gradients = list(tensors_in(floats)), list[Tensor | None]()
        if evaluation.gradient is None:
            gradients += [None] * len(inputs)
        else:
            gradients += tensors_in(layout.split(evaluation.gradient))
        for need, row in evaluation.extra.items():
            inputs += tensors_in(extra[need])
            gradients += row
        value = torch.tensor(
            evaluation.value, dtype=_wide(inputs[0].dtype), device=inputs[0].device
        )
        pairs = [(x, g) for x, g in zip(inputs, gradients, strict=True) if g is not None]
        if pairs:
            known = [gradient for _, gradient in pairs]
            value = _KnownGradient.apply(value, known, *(x for x, _ in pairs))  # type: ignore[no-untyped-call]
        result.value = value
        self.differentiate(result)
        result.method = evaluation.method

    def fuse_with(self, term: Term, others: Sequence[Term], *, tracked: bool) -> bool:
        """Whether a term can be computed together with others, which may be none."""
        if term.may_fuse:  # what they say of their norms is not about these targets
            return not (tracked and self._targets) and all(
                other.spec.needs == term.spec.needs
                and other.may_fuse
                and other.spec.fn.fuses_with(term.spec.fn, tracked=tracked)
                for other in others
            )
        call = self._logit_call(term)
        if call is None:
            return False
        # Norms come with the values if they are with respect to the logits alone.
        if tracked and [id(t) for t in self._targets] != [id(call.arrays["logits"])]:
            return False
        calls = [*(self._logit_call(other) for other in others), call]
        together = fusable([each for each in calls if each is not None])
        return not others or [len(group.calls) for group in together] == [len(calls)]

    def compute_together(
        self, terms: Sequence[Term], weights: Sequence[float], *, tracked: bool
    ) -> Group | None:
        """Compute terms at once; None if they have to be computed one by one."""
        if terms[0].may_fuse:
            first, *others = (term.spec.fn for term in terms)
            extra = {need: self.named[need] for need in terms[0].spec.needs}
            data, logprobs = self.named["data"], self.named["logprobs"]
            joint = first.compute_together(
                others, weights, data, logprobs, tracked=tracked, **extra
            )
        else:
            joint = self._compose_logits([term.name for term in terms], weights, tracked=tracked)
        if not joint.total.requires_grad and self.source is not None:
            return None  # one by one they say which of them has no gradient
        gradients = self._total_gradients(joint.total, terms[0])
        return Group(tuple(term.name for term in terms), joint, gradients)

    def _total_gradients(self, total: Tensor, term: Term) -> Mapping[str, Row]:  # noqa: ARG002
        """The gradient of a group's total, where the caller does not go backward itself."""
        return {}

    def _compose_logits(
        self, names: Sequence[str], weights: Sequence[float], *, tracked: bool
    ) -> Joint:
        calls = [
            replace(call, weight=weight)
            for name, weight in zip(names, weights, strict=True)
            if (call := self._logit_calls[name]) is not None
        ]
        (group,) = fusable(calls)
        found = group.compute(track_grad_norms=tracked)
        values = [found.values[name] for name in names]
        if not tracked:
            return Joint(values, found.total)
        pairs = combinations(enumerate(names), 2)
        cosines = {(i, j): float(found.cosines[a, b]) for (i, a), (j, b) in pairs}
        norms = [float(found.grad_norms[name]) for name in (*names, "total")]
        return Joint(values, found.total, norms[:-1], cosines, norms[-1])

    def _logit_call(self, term: Term) -> LogitCall | None:
        if not term.reads_logits:
            return None
        if term.name not in self._logit_calls:
            spec, call = term.spec, None
            may = spec.gradient != "none" and (self._fuse_base or not term.is_base)
            if may and self.in_graph(term):
                args, keywords = spec.fn.arguments(self.named)
                call = LogitCall.of(term.name, spec.fn.fn, args, keywords, options=spec.options)
            self._logit_calls[term.name] = call
        return self._logit_calls[term.name]


class FlatInputs(Inputs):
    """The log-probs as one flat leaf, which all terms share; extra inputs are leaves beside it."""

    source = "the log-probs"
    inline_by_default = False
    _flat: tuple[Layout, Tensor]

    def __init__(
        self, data: Any, logprobs: LogProbs, given: Mapping[str, Nest], needs: Iterable[str]
    ) -> None:
        self._given, self._flat = given, flatten(logprobs)
        layout, flat = self._flat
        self._leaf = leaf_over(flat)
        self._extra = {need: leaves_of(given[need]) for need in needs}
        named = {"data": data, "logprobs": layout.split(self._leaf), **self._extra}
        super().__init__(named, LOGPROBS)

    def in_graph(self, term: Term) -> bool:
        """Whether autograd differentiates the term."""
        return term.spec.gradient in ("auto", "autograd")

    def space(self, term: Term) -> tuple[str, ...]:
        """The extra inputs of a term that has some, else the log-probs."""
        return (term.spec.needs if self.in_graph(term) else ()) or (LOGPROBS,)

    def differentiate(self, result: TermResult) -> None:
        """Differentiate a value at once, so that its graph need not be kept."""
        assert result.value is not None  # noqa: S101 - for mypy: the caller has set it
        began = perf_counter()
        extra = {need: self._extra[need] for need in result.term.spec.needs}
        gradient, by_need = split_gradient(result.value, self._leaf, extra)
        result.gradients = by_need if gradient is None else {LOGPROBS: [gradient], **by_need}
        result.value = result.value.detach()
        if result.gradients:
            result.method, result.gradient_duration = "autograd", perf_counter() - began

    def accept(self, result: TermResult, evaluation: Evaluation) -> None:
        """Take the gradient of an isolated call as it is."""
        gradient, by_need = evaluation.gradient, evaluation.extra
        result.gradients = by_need if gradient is None else {LOGPROBS: [gradient], **by_need}

    def gradients(self, totals: Mapping[str, Row]) -> dict[str, Any]:
        """The total gradients in the structure of what was given, as fields of the output."""
        (total,) = totals.get(LOGPROBS, [None])
        beyond = {
            need: filled(self._given[need], r) for need, r in totals.items() if need != LOGPROBS
        }
        layout, flat = self._flat
        gradients = layout.split(torch.zeros_like(flat) if total is None else total)
        return {"gradients": gradients, "beyond": beyond}

    def _total_gradients(self, total: Tensor, term: Term) -> Mapping[str, Row]:
        extra = {need: self._extra[need] for need in term.spec.needs}
        return split_gradient(total, self._leaf, extra)[1]


def runs_in_graph(spec: RegularizerSpec) -> bool:
    """Whether a term needs neither another thread nor an estimated gradient."""
    return (
        spec.run_in in ("auto", "inline")
        and spec.timeout is None
        and spec.gradient not in ("numerical", "score")
        and not spec.is_async
    )


def call_term(spec: RegularizerSpec, named: Mapping[str, Any]) -> Any:
    """Call a term on named inputs; gives what it returned."""
    if isinstance(spec.fn, Named):
        return spec.fn(named, **spec.options)
    extra = {need: named[need] for need in spec.needs}
    return spec.call(named["data"], named["logprobs"], **spec.options, **extra)


def widened(spec: RegularizerSpec, value: Tensor) -> Tensor:
    """The value in float32 or more, since a sum of halves would lose the small terms."""
    if value.dtype not in (torch.float32, torch.float64):
        value = value.float()
    return value.detach() if spec.gradient == "none" else value


def requiring_grad(nest: object) -> list[Tensor]:
    """The tensors in a nest that a gradient can flow to, each once."""
    if not torch.is_grad_enabled():
        return []
    return [tensor for tensor in tensors_in(nest) if tensor.requires_grad]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Slot:
    """Where a tensor was: its place in the list, and its dtype."""

    index: int
    dtype: torch.dtype


def _take_floats(nest: Any) -> tuple[Any, list[Tensor]]:
    """The nest with a slot for each tensor that requires a gradient, and these tensors."""
    floats: list[Tensor] = []

    def kept(tensor: Tensor) -> Any:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor.detach()
        floats.append(tensor)
        return _Slot(len(floats) - 1, tensor.dtype)

    return mapped(nest, kept), floats


@dataclass(frozen=True)
class _WithFloats:
    """A function whose arguments have slots for the tensors that its gradient goes to.

    Attributes:
        fn: the function.
        precise: whether all floats get the dtype of the vector, as differences need their digits.
    """

    fn: Any
    precise: bool

    def __call__(self, data: Any, floats: Sequence[Tensor], **options: Any) -> Any:
        """Call the function on the arguments with `floats` in their slots."""
        if self.precise:
            wide = floats[0].dtype
            data = mapped(data, lambda t: t.to(wide) if t.is_floating_point() else t)
            args, keywords = mapped(data, lambda slot: floats[slot.index], _Slot)
        else:
            args, keywords = mapped(data, lambda slot: floats[slot.index].to(slot.dtype), _Slot)
        return self.fn(*args, **{**keywords, **options})


class _KnownGradient(torch.autograd.Function):
    """A value whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream * gradient for gradient in ctx.saved_tensors)
