"""Inputs of a call, by name, and the tensors that its terms are differentiated with respect to.

A term runs in the autograd graph of the inputs, or on detached copies of them. In the second case
its gradient is computed apart, and its value is given that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import combinations
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from steelyard.composition.input_names import Named, Reads
from steelyard.composition.own_data import JoinedData
from steelyard.composition.terms import LOGPROBS, PARAMETERS, Group, Joint, Term, TermResult
from steelyard.errors import GradientError
from steelyard.execution.random_state import Randomness
from steelyard.gradients.algebra import Row, differentiate, split_gradient
from steelyard.gradients.isolated import IsolatedCall, ValueAndGradient
from steelyard.gradients.layout import (
    Layout,
    LogProbs,
    Nest,
    SplitOnRead,
    device_of,
    filled,
    flatten,
    leaf_over,
    leaves_of,
    mapped,
    tensors_in,
)
from steelyard.gradients.sharded import whole
from steelyard.penalties.from_logits.fusion import LogitCall, fusable
from steelyard.penalties.from_logits.projection import Projection
from steelyard.spec.error_messages import title
from steelyard.spec.regularizer import REFERENCE_INPUTS, RegularizerSpec

_OF_MODEL = frozenset({PARAMETERS, "projection"})
# d term / d parameters of each of several terms, from d term / d logprobs and, by need,
# d term / d extra inputs of each.
ParameterGradients: TypeAlias = Callable[
    [Sequence[tuple[LogProbs, Mapping[str, Nest]]]], Sequence[Sequence[Tensor | None]]
]
# Of a term's inline calls, one in so many is checked for writes to its input, the first included:
# a check of each call would cost a small term a tenth of its time.
_CALLS_BETWEEN_CHECKS = 64


class Inputs:
    """The inputs of one call, in the caller's graph.

    Args:
        named: the inputs of the terms, by name; if `"data"` are a `JoinedData`, also those of the
            terms with data of their own.
        space: name of the space of the gradient norms.
        targets: the tensors of that space; empty if norms are not tracked.
        fuse_base: whether the base loss may be fused with terms.

    Attributes:
        named: the inputs of the base loss and of the terms over the batch.
        inline_by_default: whether `run_in="auto"` is inline, since terms may close over trained
            tensors, whose gradient an offloaded call would lose.
    """

    inline_by_default = True

    def __init__(
        self,
        named: Mapping[str, Any],
        space: str,
        targets: Sequence[Tensor] = (),
        *,
        fuse_base: bool = True,
    ) -> None:
        self._own: Mapping[str, Mapping[str, Any]] = {}
        if isinstance(named.get("data"), JoinedData):
            named, self._own = named["data"].split_inputs(named)
        self.named, self.main_space = named, space
        self._targets, self._fuse_base = targets, fuse_base
        self._logit_calls: dict[str, LogitCall | None] = {}
        self._copied: dict[str, tuple[Layout, LogProbs, Mapping[str, Any]]] = {}

    @cached_property
    def source(self) -> str | None:
        """Name of the differentiated inputs in messages; None if none requires a gradient."""
        return "what it reads" if requiring_grad(self.named) else None

    def in_graph(self, term: Term) -> bool:
        """Whether a term stays in the graph when it runs inline."""
        return runs_in_graph(term.spec)

    def space(self, term: Term) -> tuple[str, ...]:  # noqa: ARG002 - all terms have the same
        """Names of the inputs that the term's gradient norm is with respect to."""
        return (self.main_space,)

    def named_of(self, term: Term) -> Mapping[str, Any]:
        """The inputs of a term by name: those of its own data if it has any."""
        return self._own.get(term.name, self.named)

    def call(self, term: Term, randomness: Randomness | None = None) -> Any:
        """Call a term."""
        return call_term(term.spec, self.named_of(term), randomness)

    def zero(self) -> Tensor:
        """A loss of 0 with a gradient of 0, of a base loss that has nothing to measure."""
        parts = [x.flatten()[:0].sum() for x in tensors_in(self.named["logprobs"])]
        return torch.stack(parts).sum()

    def differentiate(self, result: TermResult) -> None:
        """Keep the graph for the caller's backward pass; differentiate only to track norms."""
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

    def gradient_size(self, result: TermResult) -> float:
        """Σ |∂ loss / ∂ input| of a term, over all inputs that require a gradient."""
        inputs = requiring_grad(self.named)
        if not inputs or result.value is None or not result.value.requires_grad:
            return 0.0
        row = differentiate(result.value, inputs)
        return sum(whole(gradient.abs().sum()).item() for gradient in row if gradient is not None)

    def isolated(self, term: Term, *, check_finite: bool) -> IsolatedCall:
        """Build the call on detached copies of the inputs, to run in any thread or process."""
        spec, fn, gradient = term.spec, term.spec.fn, term.spec.gradient
        named, known = self.named_of(term), self._flat_of(term)
        call, extra = spec.call, {need: named[need] for need in spec.needs}
        floats: LogProbs
        if not isinstance(fn, Reads):
            data, floats = named["data"], named["logprobs"]
            if gradient != "score" and not known and not requiring_grad([floats, extra]):
                gradient = "none"
        elif gradient == "score":  # its two inputs are the data and their log-probs
            (data, floats), keywords = fn.arguments(named)
            call = partial(fn.fn, **keywords)
        else:
            data, floats = _take_floats(fn.arguments(named))
            call = _WithFloats(fn.fn, precise=gradient == "numerical")
            if floats:
                # The flat vector has one dtype; the term receives each tensor in its own.
                dtype = reduce(torch.promote_types, (x.dtype for x in floats))
                floats = [x.to(dtype) for x in floats]
            else:
                gradient, floats = "none", [torch.empty(0)]
        layout, flat = known or flatten(floats)
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

    def _flat_of(self, term: Term) -> tuple[Layout, Tensor] | None:  # noqa: ARG002
        """The log-probs that a term reads as one vector, where there is one."""
        return None

    def accept(self, result: TermResult, evaluation: ValueAndGradient) -> None:
        """Attach the gradient of an isolated call to its value, for the caller's backward pass.

        The value gets an autograd node whose backward returns the known gradients, so that the
        offloaded term takes part in `loss.backward()` like any other.
        """
        layout, floats, extra = self._copied.pop(result.term.name)
        inputs, gradients = list(tensors_in(floats)), list[Tensor | None]()
        if evaluation.gradient is None:
            gradients += [None] * len(inputs)
        else:
            gradients += tensors_in(layout.split(evaluation.gradient))
        for need, row in evaluation.extra.items():
            inputs += tensors_in(extra[need])
            gradients += row
        pairs = [(x, g) for x, g in zip(inputs, gradients, strict=True) if g is not None]
        self.attach(result, evaluation, pairs, like=inputs[0])

    def attach(
        self,
        result: TermResult,
        evaluation: ValueAndGradient,
        pairs: Sequence[tuple[Tensor, Tensor]],
        *,
        like: Tensor,
    ) -> None:
        """Set the value of a result, with a node whose backward returns known gradients.

        Args:
            result: the result.
            evaluation: its value.
            pairs: tensors of this call, and the gradient of each.
            like: a tensor on the device of the value.
        """
        assert evaluation.value is not None  # noqa: S101 - for mypy: a result that was measured
        value = torch.tensor(evaluation.value, dtype=_wide(like.dtype), device=like.device)
        if pairs:
            known = [gradient for _, gradient in pairs]
            value = _KnownGradient.apply(value, known, *(x for x, _ in pairs))  # type: ignore[no-untyped-call]
        result.value = value
        self.differentiate(result)
        result.method = evaluation.method

    def fuse_with(self, term: Term, others: Sequence[Term], *, tracked: bool) -> bool:
        """Whether a term can be fused with `others`, which may be empty."""
        if term.may_fuse:  # the norms it reports are not with respect to the targets
            return not (tracked and self._targets) and all(
                other.spec.needs == term.spec.needs
                and other.may_fuse
                and other.spec.fn.fuses_with(term.spec.fn, tracked=tracked)
                for other in others
            )
        call = self._logit_call(term)
        if call is None:
            return False
        # The fused kernel also gives norms, but only with respect to the logits.
        if tracked and [id(t) for t in self._targets] != [id(call.arrays["logits"])]:
            return False
        calls = [*(self._logit_call(other) for other in others), call]
        together = fusable([call for call in calls if call is not None])
        return not others or [len(group.calls) for group in together] == [len(calls)]

    def compute_together(
        self, terms: Sequence[Term], weights: Sequence[float], *, tracked: bool
    ) -> Group | None:
        """Compute fused terms; None if they have to be evaluated one by one."""
        if terms[0].may_fuse:
            first, *others = (term.spec.fn for term in terms)
            extra = {need: self.named[need] for need in terms[0].spec.needs}
            data, logprobs = self.named["data"], self.named["logprobs"]
            joint = first.compute_together(
                others, weights, data, logprobs, tracked=tracked, **extra
            )
            if joint is None:
                return None  # evaluated one by one, each is left out, and a base loss is 0
        else:
            joint = self._compose_logits([term.name for term in terms], weights, tracked=tracked)
        if not joint.total.requires_grad and self.source is not None:
            return None  # evaluated one by one, the term without a gradient is found
        gradients = self._total_gradients(joint.total, terms[0])
        return Group(tuple(term.name for term in terms), joint, gradients)

    def _total_gradients(self, total: Tensor, term: Term) -> Mapping[str, Row]:  # noqa: ARG002
        """Gradients of a group's total; empty where the caller runs the backward pass."""
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
        composed = group.compute(track_grad_norms=tracked)
        values = [composed.values[name] for name in names]
        if not tracked:
            return Joint(values, composed.total)
        pairs = combinations(enumerate(names), 2)
        cosines = {(i, j): float(composed.cosines[a, b]) for (i, a), (j, b) in pairs}
        norms = [float(composed.grad_norms[name]) for name in (*names, "total")]
        return Joint(values, composed.total, norms[:-1], cosines, norms[-1])

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
    """All log-probs as one flat leaf, shared by the terms; extra inputs are further leaves.

    Args:
        data: passed to the terms.
        logprobs: of the data.
        given: the extra inputs.
        needs: names of those that the terms of this call read.
        parameter_gradients: computes them; gradients are then compared with respect to these.
    """

    source = "the log-probs"
    inline_by_default = False

    def __init__(
        self,
        data: Any,
        logprobs: LogProbs,
        given: Mapping[str, Nest],
        needs: Iterable[str],
        parameter_gradients: ParameterGradients | None = None,
    ) -> None:
        self._parameter_gradients = parameter_gradients
        self._given, self._flat = given, flatten(logprobs)
        self._joined = data if isinstance(data, JoinedData) else None
        layout, flat = self._flat
        self._leaf = leaf_over(flat)
        self._extra = {
            need: given[need] if need in REFERENCE_INPUTS else leaves_of(given[need])
            for need in needs
        }
        named = {"data": data, "logprobs": layout.split(self._leaf), **self._extra}
        if parameter_gradients is None:
            super().__init__(named, LOGPROBS)
        else:
            super().__init__(named, PARAMETERS, list(tensors_in(given[PARAMETERS])))

    def call(self, term: Term, randomness: Randomness | None = None) -> Any:
        """Call a term; some of the calls are checked for writes to the shared log-probs.

        Autograd refuses in-place operations on the leaf, but does not see those through `.data`.

        Raises:
            GradientError: the term has changed the log-probs; they are restored.
        """
        facts = term.statistics
        facts.inline_calls += 1
        if facts.inline_calls % _CALLS_BETWEEN_CHECKS != 1:
            return super().call(term, randomness)
        flat = self._flat[1]
        before = flat.clone()
        returned = super().call(term, randomness)
        if not torch.equal(flat, before) and not before.isnan().any():
            flat.data.copy_(before)  # as it was written: autograd should not see it either
            raise GradientError(
                f"{title(term.name)} must leave the log-probs as they are, which other terms read "
                f"too, and has written to them: work on a copy, logprobs.clone().",
                term=term.name,
            )
        return returned

    def in_graph(self, term: Term) -> bool:
        """Whether autograd differentiates the term."""
        return term.spec.gradient in ("auto", "autograd")

    def space(self, term: Term) -> tuple[str, ...]:
        """The extra inputs that the term needs, or the log-probs if it needs none.

        The parameters for all terms alike, if gradients are compared there.
        """
        if self._parameter_gradients is not None:
            return (PARAMETERS,)
        return (term.spec.differentiated if self.in_graph(term) else ()) or (LOGPROBS,)

    def differentiate(self, result: TermResult) -> None:
        """Differentiate a value immediately, so that its graph can be freed."""
        assert result.value is not None  # noqa: S101 - for mypy: the caller has set it
        began = perf_counter()
        extra = {need: self._extra[need] for need in result.term.spec.differentiated}
        gradient, by_need = split_gradient(result.value, self._leaf, extra)
        result.gradients = by_need if gradient is None else {LOGPROBS: [gradient], **by_need}
        result.value = result.value.detach()
        if result.gradients:
            result.method, result.gradient_duration = "autograd", perf_counter() - began

    def accept(self, result: TermResult, evaluation: ValueAndGradient) -> None:
        """Store the gradient of an isolated call, as one with respect to the inputs of all data."""
        gradient, extra = evaluation.gradient, evaluation.extra
        extra = {need: extra[need] for need in result.term.spec.differentiated if need in extra}
        if self._joined is not None:
            gradient, extra = self._among_all(result.term, gradient, extra)
        result.gradients = extra if gradient is None else {LOGPROBS: [gradient], **extra}

    def _flat_of(self, term: Term) -> tuple[Layout, Tensor]:
        layout, flat = self._flat
        if self._joined is None:
            return self._flat
        place = self._joined.slice_of(term.name)
        start, sizes = sum(layout.sizes[: place.start]), layout.sizes[place]
        shapes = None if layout.shapes is None else layout.shapes[place]
        return Layout("list", sizes, shapes), flat[start : start + sum(sizes)]

    def _among_all(
        self, term: Term, gradient: Tensor | None, extra: Mapping[str, Row]
    ) -> tuple[Tensor | None, Mapping[str, Row]]:
        """Gradients with respect to the inputs that a term reads, among those of all data."""
        layout, flat = self._flat
        assert self._joined is not None  # noqa: S101 - for mypy: the caller has seen it
        if gradient is not None:
            start = sum(layout.sizes[: self._joined.slice_of(term.name).start])
            of_all = torch.zeros_like(flat)
            of_all[start : start + gradient.numel()] = gradient
            gradient = of_all
        rows: dict[str, Row] = {}
        for need, row in extra.items():
            own = tensors_in(self.named_of(term)[need])
            known = {id(leaf): g for leaf, g in zip(own, row, strict=True)}
            rows[need] = [known.get(id(leaf)) for leaf in tensors_in(self._extra[need])]
        return gradient, rows

    def add_parameter_gradients(self, results: Sequence[TermResult]) -> None:
        """Give each term its whole gradient of the parameters.

        That is the one through the model, from the log-probs and the extra inputs, and the direct
        one of a term that reads the parameters itself.
        """
        assert self._parameter_gradients is not None  # noqa: S101 - for mypy: the caller has given it
        layout, flat = self._flat
        # The gradient of a term that reads nothing but the parameters is whole already.
        done = [r for r in results if r.gradients.keys() - {PARAMETERS}]
        started = [
            (
                layout.split(_only(r.gradients.get(LOGPROBS), flat)),
                {
                    need: filled(self._given[need], row)
                    for need, row in r.gradients.items()
                    if need != LOGPROBS
                },
            )
            for r in done
        ]
        for result, row in zip(done, self._parameter_gradients(started), strict=True):
            result.gradients = {**result.gradients, PARAMETERS: row}

    def gradient_size(self, result: TermResult) -> float:
        """Σ |∂ loss / ∂ log-prob| of a term."""
        row = result.gradients.get(LOGPROBS, ())
        return sum(gradient.abs().sum().item() for gradient in row if gradient is not None)

    def gradients(
        self, totals: Mapping[str, Row], results: Sequence[TermResult], *, tracked: bool
    ) -> dict[str, Any]:
        """Gradients in the structure of the inputs, as fields of the output.

        Args:
            totals: of the composed loss, by space.
            results: of the terms.
            tracked: whether to keep the gradient of each term.
        """
        extra = {
            need: filled(self._given[need], r) for need, r in totals.items() if need != LOGPROBS
        }
        layout, flat = self._flat
        gradients = layout.split(_only(totals.get(LOGPROBS), flat))
        fields: dict[str, Any] = {"gradients": gradients, "extra_gradients": extra}
        if tracked:
            # Also where norms are with respect to the parameters.
            done = [
                r for r in results if not (self.in_graph(r.term) and r.term.spec.differentiated)
            ]
            rows = {r.term.name: r.gradients.get(LOGPROBS, ()) for r in done}
            own = {name: g for name, row in rows.items() for g in row if g is not None}
            fields["term_gradients"] = SplitOnRead(layout, own)
        return fields

    def gradients_of_model(self, results: Sequence[TermResult]) -> dict[str, Row]:
        """Gradients with respect to the model's parameters, of the terms whose norm includes them.

        These are the parameters, and the layer of a projection: the only inputs that all calls of
        an optimizer step have in common. Of minus a term that has a lower bound.
        """
        projections = tensors_in(mapped(self._extra.get("projection"), _layer_of, Projection))
        layer = {id(tensor) for tensor in projections}
        rows: dict[str, Row] = {}
        for result in results:
            space = set(result.space)
            if _OF_MODEL.isdisjoint(space) or not result.gradients.keys() >= space:
                continue
            row: list[Tensor | None] = []
            for need in result.space:
                gradient = result.gradients[need]
                if need == PARAMETERS:
                    row += gradient
                elif need == "projection":
                    pairs = zip(gradient, tensors_in(self._extra[need]), strict=True)
                    row += [g for g, tensor in pairs if id(tensor) in layer]
            lower = result.bound is not None and not result.bound.upper
            rows[result.term.name] = [None if g is None else -g for g in row] if lower else row
        return rows

    def _total_gradients(self, total: Tensor, term: Term) -> Mapping[str, Row]:
        extra = {need: self._extra[need] for need in term.spec.differentiated}
        return split_gradient(total, self._leaf, extra)[1]


def _layer_of(projection: Projection) -> list[Tensor | None]:
    return [projection.weight, projection.bias]


def _only(row: Row | None, like: Tensor) -> Tensor:
    """The one tensor of a row; zeros if it has none."""
    return torch.zeros_like(like) if row is None or row[0] is None else row[0]


def runs_in_graph(spec: RegularizerSpec) -> bool:
    """Whether a term runs inline and is differentiated by autograd."""
    return (
        spec.run_in in ("auto", "inline")
        and spec.ranks == "all"
        and spec.timeout is None
        and spec.gradient not in ("numerical", "score")
        and not spec.is_async
    )


def call_term(
    spec: RegularizerSpec, named: Mapping[str, Any], randomness: Randomness | None = None
) -> Any:
    """Call a term on named inputs, with a random generator if it takes one."""
    extra: dict[str, Any] = {}
    if randomness is not None and randomness.generator:
        read = spec.fn.arguments(named) if isinstance(spec.fn, Reads) else named["logprobs"]
        extra |= randomness.arguments(device_of(read))
    if isinstance(spec.fn, Named):
        return spec.fn(named, **spec.options, **extra)
    extra |= {need: named[need] for need in spec.needs}
    return spec.call(named["data"], named["logprobs"], **spec.options, **extra)


def widened(spec: RegularizerSpec, value: Tensor) -> Tensor:
    """Cast a value to at least float32: a sum in half precision would lose small terms."""
    if value.dtype not in (torch.float32, torch.float64):
        value = value.float()
    return value.detach() if spec.gradient == "none" else value


def requiring_grad(nest: object) -> list[Tensor]:
    """Tensors in a nested structure that require a gradient, each once."""
    if not torch.is_grad_enabled():
        return []
    return [tensor for tensor in tensors_in(nest) if tensor.requires_grad]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Placeholder:
    """Placeholder for a tensor: its index in the list of tensors, and its dtype."""

    index: int
    dtype: torch.dtype


def _take_floats(nest: Any) -> tuple[Any, list[Tensor]]:
    """Replace each tensor that requires a gradient by a placeholder; also return these tensors."""
    floats: list[Tensor] = []

    def kept(tensor: Tensor) -> Any:
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor.detach()
        floats.append(tensor)
        return _Placeholder(len(floats) - 1, tensor.dtype)

    return mapped(nest, kept), floats


@dataclass(frozen=True)
class _WithFloats:
    """A function whose arguments hold placeholders for the tensors to differentiate by.

    Attributes:
        fn: the function.
        precise: keep all floats in the dtype of the flat vector: finite differences lose too many
            digits in a narrower one.
    """

    fn: Any
    precise: bool

    @property
    def __wrapped__(self) -> Any:
        return self.fn

    def __call__(self, data: Any, floats: Sequence[Tensor], **options: Any) -> Any:
        """Call the function with `floats` in place of the placeholders."""
        if self.precise:
            wide = floats[0].dtype
            data = mapped(data, lambda t: t.to(wide) if t.is_floating_point() else t)
            args, keywords = mapped(data, lambda p: floats[p.index], _Placeholder)
        else:
            args, keywords = mapped(data, lambda p: floats[p.index].to(p.dtype), _Placeholder)
        return self.fn(*args, **{**keywords, **options})


class _KnownGradient(torch.autograd.Function):
    """Autograd node of a scalar whose gradients are known: backward is upstream * gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(upstream * gradient for gradient in ctx.saved_tensors)
