"""Models, losses and terms that the tests of this folder share; processes can import them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard import telemetry
from steelyard.composition.auxiliary_losses import aux_loss

Heard = list[tuple[str, dict[str, Any], dict[str, Any]]]


@contextmanager
def listening(*events: str) -> Iterator[Heard]:
    """What telemetry tells while the block lasts."""
    heard: Heard = []
    telemetry.attach_many(
        "test",
        events or telemetry.events.ALL,
        lambda e, m, meta, _: heard.append((e.removeprefix("steelyard."), dict(m), dict(meta))),
    )
    try:
        yield heard
    finally:
        telemetry.detach("test")


class Net(nn.Module):
    """Two layers; the outputs are named, and the hidden layer leaves an auxiliary loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(x).tanh()
        aux_loss("balance", hidden.mean(0).square().sum())
        return {"logits": self.outer(hidden), "hidden": hidden}


def batch(seed: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def activity(hidden: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return hidden.square().mean(), {"largest": hidden.abs().max()}


def confidence(logits: Tensor) -> Tensor:
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp() * logprobs).sum(-1).mean()


async def patient(logits: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return confidence(logits)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def by_hand(model: nn.Module, total: Tensor) -> tuple[float, list[Tensor]]:
    """The value and the gradients of what somebody wrote without the library."""
    model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    found = gradients(model)
    model.zero_grad()
    return total.item(), found
