"""Evaluation of a composite's terms inside a compiled function, traceable by `torch.compile`.

There no value is read and no event is emitted. Which terms are fused is decided beforehand, from
the names of their inputs, since the compiler cannot trace the decision.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from steelyard.composition.input_names import Reads
from steelyard.composition.inputs import call_term, runs_in_graph, widened
from steelyard.composition.terms import Group, Joint, Term, TermResult
from steelyard.penalties.from_logits.compose import compose_logits
from steelyard.penalties.from_logits.fusion import LogitCall, fusable


class TracedGroup(NamedTuple):
    """Terms that one kernel computes.

    Attributes:
        members: Their places among the due terms.
        parameters: For each of them, the parameters that its positional inputs are for.
        terms: Their calls, as `compose_logits` takes them.
        reduction: Their reduction.
        has_base: Whether the base loss is among them.
    """

    members: tuple[int, ...]
    parameters: tuple[tuple[str, ...], ...]
    terms: tuple[tuple[str, Mapping[str, Any]], ...]
    reduction: Literal["mean", "sum"]
    has_base: bool


def traced_groups(due: Sequence[Term]) -> tuple[TracedGroup, ...]:
    """Group the terms that are fused in a compiled function.

    Their weights are constants of the compiled function, so that a term whose weight follows a
    schedule is computed by itself: it would have to be compiled anew at every step.
    """
    places = {term.name: i for i, term in enumerate(due)}
    calls = [call for term in due if (call := _call_by_names(term)) is not None]
    return tuple(
        TracedGroup(
            tuple(places[name] for name in group.names),
            tuple(_positional(call, due[places[call.name]]) for call in group.calls),
            tuple(group.terms),
            group.reduction,
            any(due[places[name]].is_base for name in group.names),
        )
        for group in fusable(calls)
    )


def _positional(call: LogitCall, term: Term) -> tuple[str, ...]:
    """Parameters of the term's positional inputs, in order."""
    by_keyword = dict(term.spec.fn.keywords)
    return tuple(name for name in call.arrays if name not in by_keyword)


def _call_by_names(term: Term) -> LogitCall | None:
    """The term's call with the names of its inputs in place of arrays; None if it is not fused."""
    spec, fn = term.spec, term.spec.fn
    if not term.reads_logits or not isinstance(fn, Reads) or fn.optional:
        return None
    if not runs_in_graph(spec) or spec.gradient == "none" or callable(spec.weight):
        return None

    def named(name: str) -> str:  # the same object for the same input
        return sys.intern(name if fn.head is None else f"{fn.head}/{name}")

    return LogitCall.of(
        term.name,
        fn.fn,
        [named(name) for name in fn.names],
        {keyword: named(name) for keyword, name in fn.keywords},
        1.0 if term.is_base else spec.weight_at(0),
        spec.options,
    )


def evaluate_traced(
    due: Sequence[Term], weights: Tensor, groups: Sequence[TracedGroup], inputs: Mapping[str, Any]
) -> list[TermResult]:
    """Evaluate the due terms on named inputs, those of a group together."""
    results: dict[int, TermResult] = {}
    for group in groups:
        arrays: dict[str, Any] = {}
        for i, parameters in zip(group.members, group.parameters, strict=True):
            positional, extra = due[i].spec.fn.arguments(inputs)
            arrays = {**arrays, **dict(zip(parameters, positional, strict=False)), **extra}
        composed = compose_logits(terms=list(group.terms), reduction=group.reduction, **arrays)
        names = tuple(due[i].name for i in group.members)
        values = [composed.values[name] for name in names]
        together = Group(names, Joint(values, composed.total))
        for i, value in zip(group.members, values, strict=True):
            results[i] = TermResult(
                due[i], weights[i], space=("inputs",), value=value, group=together
            )
    for i, term in enumerate(due):
        if i not in results:
            results[i] = _evaluate_alone(term, weights[i], inputs)
    return [results[i] for i in range(len(due))]


def _evaluate_alone(term: Term, weight: Tensor, inputs: Mapping[str, Any]) -> TermResult:
    returned = call_term(term.spec, inputs)
    loss, custom = returned if isinstance(returned, tuple) else (returned, {})
    if loss is None and not term.is_base:
        return TermResult(term, weight, space=("inputs",), measured=False)
    kept = {k: v.detach() if isinstance(v, Tensor) else v for k, v in (custom or {}).items()}
    value = widened(term.spec, loss.reshape(()))
    return TermResult(term, weight, space=("inputs",), value=value, custom=kept)
