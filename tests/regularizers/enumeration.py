"""A tiny policy whose answers can be listed: exact expectations of values and gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .checks import plain, value_and_gradients

Answer: TypeAlias = tuple[int, ...]


class Policy:
    """Distribution over answers of at most `longest` tokens, with a row of logits per context.

    With `ends`, token 0 ends an answer; else all answers have the same length.
    """

    def __init__(self, *, seed: int, longest: int, vocabulary: int = 2, ends: bool = False) -> None:
        contexts: list[Answer] = []
        self.answers: list[Answer] = []
        open_: list[Answer] = [()]
        for _ in range(longest):
            contexts += open_
            grown = [(*answer, token) for answer in open_ for token in range(vocabulary)]
            self.answers += [answer for answer in grown if ends and answer[-1] == 0]
            open_ = [answer for answer in grown if not (ends and answer[-1] == 0)]
        self.answers += open_
        self._row = {context: index for index, context in enumerate(contexts)}
        generator = torch.Generator().manual_seed(seed)
        shape = (len(contexts), vocabulary)
        self.logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.logits.requires_grad_()

    def logprobs(self, answer: Answer) -> Tensor:
        """Log-prob of each token of an answer, differentiable by the logits."""
        rows = [self._row[answer[:place]] for place in range(len(answer))]
        return self.logits.log_softmax(-1)[rows, list(answer)]

    def probability(self, answer: Answer) -> float:
        return math.exp(self.logprobs(answer).sum().item())

    def expected(self, quantity: Callable[[Answer], Tensor | float]) -> Tensor:
        """Expectation over answers, differentiable by the logits, of probabilities and quantity."""
        each = [self.logprobs(answer).sum().exp() * quantity(answer) for answer in self.answers]
        return torch.stack(each).sum()

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logits)[0]


def expectation(
    term: Any,
    policy: Policy,
    sampling: Policy,
    fields: Callable[[Sequence[Answer]], list[dict[str, Any]]],
    *,
    count: int = 1,
) -> tuple[float, Tensor]:
    """Expected value of a term, and of its gradient by the logits of `policy`.

    Exact, over all batches of `count` answers sampled from `sampling`; the term is evaluated by
    a pipeline, as in training. `fields` makes the fields of each datum of a batch; the sampling
    log-probs are added.
    """
    value, gradient = 0.0, torch.zeros_like(policy.logits)
    for answers in itertools.product(sampling.answers, repeat=count):
        probability = math.prod(sampling.probability(answer) for answer in answers)
        data = [
            plain(logprobs=sampling.logprobs(answer).detach(), **more)
            for answer, more in zip(answers, fields(answers), strict=True)
        ]
        own = [policy.logprobs(answer) for answer in answers]
        found, factors = value_and_gradients(term, data, [row.detach() for row in own])
        value += probability * found
        gradient += probability * torch.autograd.grad(own, policy.logits, factors)[0]
    return value, gradient
