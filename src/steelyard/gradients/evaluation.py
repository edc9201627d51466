"""Evaluating a term once and differentiating it once, by whichever method its spec names."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from steelyard.errors import GradientError
from steelyard.gradients import numerical
from steelyard.gradients.beyond import Gradients, Nest, leaves_of, tensors_in
from steelyard.gradients.layout import Layout, LogProbs
from steelyard.gradients.leaf import Leaf
from steelyard.gradients.returned import as_scalar, check_finite, split_metrics
from steelyard.gradients.score import read_costs, score_gradient
from steelyard.spec import Gradient

Method: TypeAlias = Literal["autograd", "numerical", "score"]


@dataclass(frozen=True)
class Question:
    """What to evaluate: a term, its data, and the log-probs as one flat vector. It pickles."""

    term: str
    fn: Callable[..., Any]
    options: Mapping[str, Any]
    gradient: Gradient
    data: Any
    layout: Layout
    flat: Tensor
    check_finite: bool = True
    beyond: Mapping[str, Nest] = field(default_factory=dict)

    def call(self, logprobs: LogProbs, beyond: Mapping[str, Nest]) -> Any:
        """What the term returns: a result, or a coroutine that gives one."""
        return self.fn(self.data, logprobs, **self.options, **beyond)

    def copied(self) -> LogProbs:
        """The log-probs without a gradient, in memory of their own: a term may write to them."""
        return self.layout.split(self.flat.clone())


@dataclass(frozen=True)
class Evaluation:
    """What came of it.

    Attributes:
        value: the term's value.
        custom: the metrics it returned.
        gradient: flat; None if there is no path to the log-probs.
        method: how the gradient came to be; None if there is none.
        duration: seconds, the gradient included.
        gradient_duration: seconds the gradient took.
        beyond: the gradients for what the term asked for beyond log-probs, by need.
    """

    value: float
    custom: dict[str, float]
    gradient: Tensor | None
    method: Method | None
    duration: float
    gradient_duration: float
    beyond: Gradients = field(default_factory=dict)

    @property
    def gradients(self) -> list[Tensor]:
        """Every gradient there is: for the log-probs, and beyond."""
        found = [self.gradient, *(g for gs in self.beyond.values() for g in gs)]
        return [gradient for gradient in found if gradient is not None]


def evaluate(question: Question) -> Evaluation:
    """The term's value and gradient, on a leaf of its own."""
    trial = Trial(question)
    return trial.finish(trial.call())


async def aevaluate(question: Question) -> Evaluation:
    """As `evaluate`, for a term whose call gives a coroutine."""
    trial = Trial(question)
    return trial.finish(await trial.call())


def evaluate_coroutine(question: Question) -> Evaluation:
    """As `aevaluate`, in an event loop that lasts for this one call."""
    return asyncio.run(aevaluate(question))


class Trial:
    """One evaluation under way: `call` the term, then `finish` with what it returned.

    Inline terms share one `leaf`; a term that runs apart has its own.
    """

    def __init__(self, question: Question, leaf: Leaf | None = None) -> None:
        self._question = question
        self._began = perf_counter()
        self._leaf: Leaf | None = None
        if question.gradient in ("auto", "autograd"):
            self._leaf = leaf or Leaf.of(question.layout, question.flat)
            self._logprobs = self._leaf.views
            self._beyond = {need: leaves_of(n) for need, n in question.beyond.items()}
        else:
            self._logprobs = question.copied()
            self._beyond = dict(question.beyond)

    def call(self) -> Any:
        """What the term returns for these log-probs: a result, or a coroutine that gives one."""
        return self._question.call(self._logprobs, self._beyond)

    def finish(self, returned: object) -> Evaluation:
        """Read what the term returned and differentiate it.

        Raises:
            TermError: it is no loss, not finite, or cannot be differentiated as asked.
        """
        question = self._question
        result, custom = split_metrics(question.term, returned)
        gradient: Tensor | None
        method: Method | None
        beyond: Gradients = {}
        if question.gradient == "score":
            costs = read_costs(question.term, result, question.layout)
            value = self._value(costs.mean())
            began = perf_counter()
            pulls = score_gradient(question.term, costs, question.data, question.layout)
            gradient, method = pulls.to(question.flat), "score"
        else:
            loss = as_scalar(question.term, result)
            value = self._value(loss)
            began = perf_counter()
            gradient, beyond = self._autograd(loss)
            method = None if gradient is None and not beyond else "autograd"
        now = perf_counter()
        return Evaluation(value, custom, gradient, method, now - self._began, now - began, beyond)

    def _autograd(self, loss: Tensor) -> tuple[Tensor | None, Gradients]:
        question = self._question
        if self._leaf is None:
            return None, {}
        leaves = {need: list(tensors_in(nest)) for need, nest in self._beyond.items()}
        asked = [t for ts in leaves.values() for t in ts if t.requires_grad]
        gradient, *rest = self._leaf.gradients_of(loss, asked)
        if any(found is not None for found in rest):
            each = iter(rest)
            return gradient, {
                need: [next(each) if t.requires_grad else None for t in ts]
                for need, ts in leaves.items()
            }
        if gradient is None and question.gradient == "autograd":
            raise GradientError(
                f"gradient='autograd' needs a loss that depends on the log-probs through torch, "
                f"got one with no path to them (regularizer {question.term!r}): use "
                f"gradient='score' with one penalty per datum, gradient='numerical', or "
                f"gradient='none' if it is meant so.",
                term=question.term,
            )
        return gradient, {}

    def _value(self, loss: Tensor) -> float:
        value: float = loss.item()
        if self._question.check_finite:
            check_finite(self._question.term, value)
        return value


def slopes(question: Question, start: int, stop: int) -> Tensor:
    """The numerical gradient of a term with respect to `flat[start:stop]`."""
    return numerical.differences(
        lambda point: _value(question, question.call(question.layout.split(point), {})),
        question.flat,
        start,
        stop,
    )


async def aslopes(question: Question, start: int, stop: int) -> Tensor:
    """As `slopes`, for a term whose call gives a coroutine."""

    async def value(point: Tensor) -> float:
        return _value(question, await question.call(question.layout.split(point), {}))

    return await numerical.adifferences(value, question.flat, start, stop)


def slopes_coroutine(question: Question, start: int, stop: int) -> Tensor:
    """As `aslopes`, in an event loop that lasts for this one call."""
    return asyncio.run(aslopes(question, start, stop))


def check_gradient(term: str, gradient: Tensor) -> None:
    """Nothing, if all of `gradient` is finite.

    Raises:
        NonFiniteError: it is not.
    """
    bad = gradient[~torch.isfinite(gradient)]
    if bad.numel():
        worst = math.nan if bool(bad.isnan().any()) else bad[0].item()
        check_finite(term, worst, "gradient")


def _value(question: Question, returned: object) -> float:
    loss, _ = split_metrics(question.term, returned)
    value: float = as_scalar(question.term, loss).item()
    if question.check_finite:
        check_finite(question.term, value)
    return value
