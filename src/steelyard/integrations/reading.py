"""What came of one term in one call of a composite: a value that still carries its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from steelyard.composition.events import TermEvents
from steelyard.composition.term import Term
from steelyard.errors import GradientError
from steelyard.gradients import Evaluation, Method
from steelyard.gradients.returned import as_scalar, split_metrics
from steelyard.integrations.inputs import Inputs, fields_of
from steelyard.integrations.named import Named


@dataclass(eq=False)
class Reading:
    """One term in one call.

    Attributes:
        term: the base loss or a regularizer.
        weight: its weight at this step; a tensor inside a compiled function.
        value: a scalar, at least float32; its graph leads to what the term read.
        custom: the metrics the term returned.
        method: how its gradient comes to be; None if there is none.
        duration: seconds; on an accelerator, until its work was queued.
        events: what telemetry hears of it; None inside a compiled function.
        gradient_duration: seconds its gradient took; None if that is left to the caller.
        fused: whether its part of the total, and the graph, are in the total of a group.
    """

    term: Term
    weight: float | Tensor
    value: Tensor
    custom: Mapping[str, Any]
    method: Method | None = None
    duration: float = 0.0
    events: TermEvents | None = None
    gradient_duration: float | None = None
    fused: bool = False

    def report(self, value: float, grad_norm: float | None) -> None:
        """Tell of a success."""
        if self.events is None:
            return
        if self.method is not None and self.gradient_duration is not None:
            self.events.gradient(self.method, self.gradient_duration)
        evaluation = Evaluation(value, dict(self.custom), None, self.method, self.duration, 0.0)
        self.events.stop(evaluation, grad_norm)


@dataclass(eq=False)
class Turn:
    """A term that is due and runs here and now, in the caller's graph.

    Attributes:
        term: the base loss or a regularizer.
        weight: its weight at this step.
        events: what telemetry hears of it.
        begun: whether telemetry has heard that it begins.
    """

    term: Term
    weight: float
    events: TermEvents
    begun: bool = False

    @classmethod
    def of(cls, term: Term, step: int) -> Turn:
        """The term at `step`.

        Raises:
            SpecError: a schedule yields a bad weight there.
        """
        weight = term.spec.weight_at(step)
        return cls(term, weight, TermEvents(term, weight, "inline"))

    def begin(self) -> None:
        """Say that it begins, the first time."""
        if not self.begun:
            self.events.start()
            self.begun = True


def ask(term: Term, inputs: Inputs) -> Any:
    """What the term returns."""
    spec = term.spec
    if isinstance(spec.fn, Named):
        return spec.fn(inputs, **spec.options)
    needed = {need: inputs[need] for need in spec.needs}
    return spec.call(inputs["data"], inputs["logprobs"], **spec.options, **needed)


def read_inline(turn: Turn, inputs: Inputs) -> Reading:
    """A term's value, here and now, in the graph of what it reads.

    Raises:
        TermError: it is no loss, or has no gradient where one is asked for.
    """
    turn.begin()
    began, term = perf_counter(), turn.term
    loss, custom = split_metrics(term.name, ask(term, inputs))
    value = settled(term, as_scalar(term.name, loss))
    method: Method | None = "autograd" if value.requires_grad else None
    if method is None and differentiable(inputs):
        complain(term)
    duration = perf_counter() - began
    return Reading(term, turn.weight, value, custom, method, duration, turn.events)


def read_traced(term: Term, weight: Tensor, inputs: Inputs) -> Reading:
    """The same while a compiler watches: nothing is asked of a value, nobody is told."""
    returned = ask(term, inputs)
    loss, custom = returned if isinstance(returned, tuple) else (returned, {})
    kept = {k: v.detach() if isinstance(v, Tensor) else v for k, v in (custom or {}).items()}
    return Reading(term, weight, settled(term, loss.reshape(())), kept)


def settled(term: Term, value: Tensor) -> Tensor:
    """The value in float32 or more, since a sum of halves would lose the small terms."""
    value = value.to(wide(value.dtype))
    return value.detach() if term.spec.gradient == "none" else value


def wide(dtype: torch.dtype) -> torch.dtype:
    """What values of this dtype are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def differentiable(inputs: object) -> list[Tensor]:
    """The tensors in the inputs, however deep, that a gradient can flow to; each once."""
    found: dict[int, Tensor] = {}
    if torch.is_grad_enabled():
        _collect(inputs, found)
    return list(found.values())


def _collect(value: object, found: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            found[id(value)] = value
        return
    fields = fields_of(value)
    if fields is not None:
        value = list(fields.values())
    if isinstance(value, list | tuple):
        for each in value:
            _collect(each, found)


def complain(term: Term) -> None:
    """Say that the term has no gradient, unless that is meant so.

    Raises:
        GradientError: it asks for one.
    """
    if term.spec.gradient == "autograd":
        raise GradientError(
            f"gradient='autograd' needs a loss with a path to the inputs through torch, got one "
            f"without (regularizer {term.name!r}): use gradient='none' if it is meant so.",
            term=term.name,
        )
    if term.spec.gradient == "auto":
        term.warn_detached("what it reads")
