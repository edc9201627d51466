"""Training a tiny model with and without a term: the one place that knows which model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from steelyard import Pipeline

from .checks import tinkered

VOCABULARY = 32
Data: TypeAlias = Sequence[Any]


class Trained:
    """A model of the next token, and how likely it finds data."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 16), torch.nn.Tanh(), torch.nn.Linear(16, VOCABULARY)
        )
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=0.03)

    def logprobs(self, data: Data) -> list[Tensor]:
        """The log-prob of each target, `[T]` or `[T, K]`."""
        with torch.no_grad():
            return self._forward(data)

    def step(self, data: Data, pipeline: Pipeline, number: int) -> None:
        """One step of training: the pipeline's gradient with respect to the log-probs, back."""
        logprobs = self._forward(data)
        output = pipeline.compute(data, [row.detach() for row in logprobs], number)
        self._optimizer.zero_grad()
        torch.autograd.backward(logprobs, output.gradients)  # type: ignore[arg-type]  # a list
        self._optimizer.step()

    def _forward(self, data: Data) -> list[Tensor]:
        found = []
        for datum in data:
            tokens = torch.tensor(datum.model_input.to_ints())
            targets = datum.loss_fn_inputs["target_tokens"].to_torch()
            rows = self.model(tokens).log_softmax(-1)
            wide = targets if targets.dim() == 2 else targets[:, None]
            picked = rows.gather(-1, wide)
            found.append(picked if targets.dim() == 2 else picked[:, 0])
        return found


def train(
    data: Data | Callable[[Trained, torch.Generator], Data],
    loss_fn: Any,
    regularizers: Sequence[Any] = (),
    *,
    steps: int = 60,
) -> Trained:
    """A model after some steps, the same but for what it is given.

    `data` is a batch, or a function that makes one from the model as it is: on-policy data.
    """
    trained = Trained()
    generator = torch.Generator().manual_seed(1)
    pipeline = Pipeline(loss_fn, regularizers)
    for number in range(steps):
        batch = data(trained, generator) if callable(data) else data
        trained.step(batch, pipeline, number)
    return trained


def sequence(tokens: Sequence[int], **fields: Any) -> Any:
    """A datum that predicts each token from those before it."""
    return tinkered(tokens=tokens[:-1], target_tokens=list(tokens[1:]), **fields)


def next_token(trained: Trained, prompt: int) -> Tensor:
    """The whole distribution of the token after a prompt, as log-probs."""
    every = [sequence([prompt, token]) for token in range(VOCABULARY)]
    return torch.cat(trained.logprobs(every))


def entropy(logprobs: Tensor) -> float:
    return float(-(logprobs.exp() * logprobs).sum())


def kl(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum())


# Base losses.


def nll(_: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def held(data: Data, logprobs: list[Tensor]) -> Tensor:
    """Holds each token's log-prob where the datum says."""
    places = [datum.loss_fn_inputs["held"].to_torch() for datum in data]
    return (torch.cat(logprobs) - torch.cat(places)).square().mean()


def policy_gradient(data: Data, logprobs: list[Tensor]) -> Tensor:
    gains = [datum.loss_fn_inputs["advantages"].to_torch() for datum in data]
    return -(torch.cat(logprobs) * torch.cat(gains)).mean()


def nothing(_: Any, logprobs: list[Tensor]) -> Tensor:
    return 0.0 * torch.cat([row.reshape(-1) for row in logprobs]).sum()
