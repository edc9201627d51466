"""A call of a term outside of the caller's autograd graph: it pickles, and can run anywhere.

The term works on a copy of the tensors it is differentiated with respect to. The result is a
number with its gradient: by autograd, by central differences, or by the score-function estimator.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal, TypeAlias, TypeVar

import cloudpickle
import torch
from torch import Tensor

from steelyard.execution.process_lifecycle import ForkGuard
from steelyard.execution.random_state import Randomness
from steelyard.gradients import estimators
from steelyard.gradients.algebra import Row, check_gradient, split_gradient
from steelyard.gradients.estimators import read_costs, score_gradient
from steelyard.gradients.layout import (
    Layout,
    LogProbs,
    Nest,
    device_of,
    leaf_over,
    leaves_of,
    mapped,
)
from steelyard.gradients.parse_result import (
    as_scalar,
    check_finite,
    is_unmeasured,
    split_metrics,
)
from steelyard.spec.regularizer import Gradient

Method: TypeAlias = Literal["autograd", "numerical", "score"]
T = TypeVar("T")
# A coroutine is usually a request to a server; this limits the concurrent ones.
REQUESTS_AT_ONCE = 64


@dataclass(frozen=True)
class ValueAndGradient:
    """Value and gradient of a term, as plain data.

    Attributes:
        value: the term's value; None if this batch has nothing that it measures.
        custom: the metrics it returned.
        gradient: with respect to the flat vector; None if there is no path.
        method: how the gradient was computed; None if there is none.
        duration: seconds, the gradient included.
        gradient_duration: seconds the gradient took.
        extra: the gradients with respect to extra inputs, by need.
        drew: whether the call was seen to draw from a global random generator.
        changed: attributes of the term's object that the call changed, if that is looked at.
    """

    value: float | None
    custom: dict[str, float]
    gradient: Tensor | None
    method: Method | None
    duration: float
    gradient_duration: float
    extra: Mapping[str, Row] = field(default_factory=dict)
    drew: bool = False
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class IsolatedCall:
    """A term with all of its inputs.

    Attributes:
        term: its name.
        fn: called as `fn(data, logprobs, **options, **extra)`.
        options: keyword arguments.
        gradient: how to differentiate it.
        data: passed to `fn` unchanged.
        layout: how the flat vector divides into the tensors that the term receives.
        flat: the vector that it is differentiated with respect to, `[N]`.
        check_finite: whether a value or a gradient that is not finite is an error.
        extra: the extra inputs, by need.
        is_async: whether `fn` returns a coroutine.
        randomness: of the random numbers it draws; None if it draws none.
        records_changes: whether to see if it changes the object that `fn` belongs to.
    """

    term: str
    fn: Callable[..., Any]
    options: Mapping[str, Any]
    gradient: Gradient
    data: Any
    layout: Layout
    flat: Tensor
    check_finite: bool = True
    extra: Mapping[str, Nest] = field(default_factory=dict)
    is_async: bool = False
    randomness: Randomness | None = None
    records_changes: bool = False

    def run(self) -> ValueAndGradient:
        """Evaluate the term once and differentiate it once; without a numerical gradient.

        Raises:
            TermError: it returned no loss, or one that is not finite.
        """
        return self._now(self.arun())

    def run_whole(self) -> ValueAndGradient:
        """As `run`, with the numerical gradient if `gradient` is `"numerical"`."""
        if self.gradient != "numerical":
            return self.run()
        estimators.check_count(self.term, self.flat.numel())
        began, evaluation = perf_counter(), self.run()
        if evaluation.value is None:
            return evaluation
        slopes = self.slopes(0, self.flat.numel())
        return self.with_slopes(evaluation, slopes, perf_counter() - began)

    def slopes(self, start: int, stop: int) -> Tensor:
        """Compute the numerical gradient with respect to `flat[start:stop]`."""
        return self._now(self.aslopes(start, stop))

    async def aslopes(self, start: int, stop: int) -> Tensor:
        """As `slopes`, awaited."""

        async def value(point: Tensor) -> float:
            returned = await self._call_seeded(self.layout.split(point))
            loss = split_metrics(self.term, returned)[0]
            if is_unmeasured(self.term, loss):  # `with_slopes` drops the slopes of such a batch
                return math.nan
            return self._number(as_scalar(self.term, loss))

        at_once = REQUESTS_AT_ONCE if self.is_async else 1
        return await estimators.differences(value, self.flat, start, stop, at_once)

    async def arun(self) -> ValueAndGradient:
        """As `run`, awaited."""
        record = AttributeRecord(self.fn) if self.records_changes else None
        randomness = self.randomness
        if randomness is None or not randomness.seeds_global:
            evaluation = await self._evaluate()
        else:
            states = randomness.states()
            evaluation = replace(await states.run(self._evaluate()), drew=states.drew)
        return evaluation if record is None else replace(evaluation, changed=record.changed())

    async def _evaluate(self) -> ValueAndGradient:
        began, leaf = perf_counter(), None
        if self.gradient in ("auto", "autograd"):
            leaf = leaf_over(self.flat)
            logprobs = self.layout.split(leaf)
            extra = {need: leaves_of(nest) for need, nest in self.extra.items()}
        else:  # the log-probs as a copy, to which the term may write
            logprobs = self.layout.split(self.flat.clone())
            extra = mapped(self.extra, Tensor.detach)
        result, custom = split_metrics(self.term, await self._call(logprobs, extra))
        if is_unmeasured(self.term, result):
            return ValueAndGradient(None, custom, None, None, perf_counter() - began, 0.0)
        gradient: Tensor | None = None
        by_need: Mapping[str, Row] = {}
        method: Method | None = None
        if self.gradient == "score":
            costs = read_costs(self.term, result, self.layout)
            value, called = self._number(costs.mean()), perf_counter()
            gradient = score_gradient(self.term, costs, self.data, self.layout).to(self.flat)
            method = "score"
        else:
            loss = as_scalar(self.term, result)
            value, called = self._number(loss), perf_counter()
            if leaf is not None:
                gradient, by_need = split_gradient(loss, leaf, extra)
                method = None if gradient is None and not by_need else "autograd"
        if self.check_finite:
            check_gradient(self.term, [gradient, *(g for row in by_need.values() for g in row)])
        now = perf_counter()
        return ValueAndGradient(value, custom, gradient, method, now - began, now - called, by_need)

    def with_slopes(
        self, evaluation: ValueAndGradient, slopes: Tensor, seconds: float
    ) -> ValueAndGradient:
        """Add the numerical gradient, computed by other calls, to an evaluation.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        if evaluation.value is None:
            return evaluation
        if self.check_finite:
            check_gradient(self.term, [slopes])
        return replace(
            evaluation,
            gradient=slopes.to(self.flat),
            method="numerical",
            duration=seconds,
            gradient_duration=seconds,
        )

    async def _call(self, logprobs: LogProbs, extra: Mapping[str, Nest]) -> Any:
        generator: Mapping[str, torch.Generator] = {}
        if self.randomness is not None:
            generator = self.randomness.arguments(device_of([logprobs, self.data]))
        with ForkGuard(self.term):
            returned = self.fn(self.data, logprobs, **self.options, **extra, **generator)
            return await returned if self.is_async else returned

    async def _call_seeded(self, logprobs: LogProbs) -> Any:
        """Call it without extra inputs; every call draws the same numbers."""
        call, randomness = self._call(logprobs, {}), self.randomness
        if randomness is None or not randomness.seeds_global:
            return await call
        return await randomness.states().run(call)

    def _now(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; that of a plain function never waits, without a loop."""
        if self.is_async:
            return asyncio.run(coroutine)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        raise AssertionError("the coroutine of a plain function never waits")  # pragma: no cover

    def _number(self, loss: Tensor) -> float:
        value: float = loss.item()
        if self.check_finite:
            check_finite(self.term, value)
        return value


class AttributeRecord:
    """The attributes of the object that a function belongs to, as they would be sent.

    Args:
        fn: a bound method, a callable object, or a wrapper of one.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._owner = _owner_of(fn)
        self._attributes = _attributes_of(self._owner)

    def changed(self) -> tuple[str, ...]:
        """Names of those that have changed since; a cached property that was read has not."""
        now = _attributes_of(self._owner)
        return tuple(name for name, value in now.items() if self._attributes.get(name) != value)


def _owner_of(fn: Any) -> object:
    while True:
        if isinstance(fn, partial):
            fn = fn.func
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            return getattr(fn, "__self__", fn)


def _attributes_of(owner: object) -> dict[str, bytes]:
    """Pickles of the attributes; without those that do not pickle, such as a connection."""
    pickles: dict[str, bytes] = {}
    try:
        state = owner.__getstate__()
    except Exception:  # noqa: BLE001 - anybody's code
        state = None
    for name, value in (state if isinstance(state, Mapping) else {}).items():
        if not isinstance(getattr(type(owner), name, None), cached_property):
            with suppress(Exception):
                pickles[name] = cloudpickle.dumps(value)
    return pickles
