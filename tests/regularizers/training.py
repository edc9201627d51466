"""Training the engine's tiny model with and without a term."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from tinker import types
from torch import Tensor

from steelyard import regularize
from steelyard.engine import LocalServiceClient

from .checks import tinkered

VOCABULARY = 512
Data: TypeAlias = Sequence[Any]


@functools.cache
def service() -> LocalServiceClient:
    return LocalServiceClient()


class Trained:
    """Tiny random Llama with a fresh adapter, and its log-probs of data."""

    def __init__(self) -> None:
        training = service().create_lora_training_client("tiny-random", rank=8, seed=0)
        self._client = regularize(training)

    def logprobs(self, data: Data) -> list[Tensor]:
        """The log-prob of each target, `[T]` or `[T, K]`."""
        output = self._client.forward(list(data), "cross_entropy").result()
        return [found["logprobs"].to_torch() for found in output.loss_fn_outputs]

    def step(
        self, data: Data, loss_fn: Any, regularizers: Sequence[Any], rate: float = 0.004
    ) -> None:
        """One step of training."""
        self._client.forward_backward_custom(list(data), loss_fn, regularizers)
        self._client.optim_step(types.AdamParams(learning_rate=rate)).result()


def train(
    data: Data | Callable[[Trained, torch.Generator], Data],
    loss_fn: Any,
    regularizers: Sequence[Any] = (),
    *,
    steps: int = 40,
    rate: float = 0.004,
) -> Trained:
    """Train a model from the same initial state for some steps.

    `data` is a batch, or a function that samples one from the current model (on-policy data).
    """
    trained = Trained()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = data(trained, generator) if callable(data) else data
        trained.step(batch, loss_fn, regularizers, rate)
    return trained


def sequence(tokens: Sequence[int], **fields: Any) -> Any:
    """Datum with the next token as target of each, unless `target_tokens` is given."""
    return tinkered(tokens=tokens[:-1], **{"target_tokens": list(tokens[1:]), **fields})


def next_tokens(trained: Trained, tokens: Sequence[int]) -> Tensor:
    """The whole distribution of each next token of a sequence, `[T, V]`."""
    every = [list(range(VOCABULARY))] * (len(tokens) - 1)
    (found,) = trained.logprobs([sequence(tokens, target_tokens=every)])
    return found


def entropy(trained: Trained, tokens: Sequence[int]) -> float:
    """The mean entropy of the next tokens of a sequence."""
    p = next_tokens(trained, tokens)
    return float(-(p.exp() * p).sum(-1).mean())


def kl(trained: Trained, other: Trained, tokens: Sequence[int]) -> float:
    """The mean KL divergence of the next tokens of a sequence."""
    p, q = next_tokens(trained, tokens), next_tokens(other, tokens)
    return float((p.exp() * (p - q)).sum(-1).mean())


# Base losses.


def nll(_: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def held(data: Data, logprobs: list[Tensor]) -> Tensor:
    """Squared distance of each token's log-prob from the datum's field `held`."""
    targets = [datum.loss_fn_inputs["held"].to_torch() for datum in data]
    return (torch.cat(logprobs) - torch.cat(targets)).square().mean()


def first_class(_: Any, logprobs: list[Tensor]) -> Tensor:
    """The negative log-likelihood of the first of the listed classes."""
    return -torch.cat(logprobs)[:, 0].mean()


def policy_gradient(data: Data, logprobs: list[Tensor]) -> Tensor:
    gains = [datum.loss_fn_inputs["advantages"].to_torch() for datum in data]
    return -(torch.cat(logprobs) * torch.cat(gains)).mean()
