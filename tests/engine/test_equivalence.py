"""Five training steps in one pass, in two passes and by plain torch end with equal weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient, LocalTrainingClient
from tests.engine.by_hand import ByHand, datum

STEPS, RANK, LR = 5, 4, 0.01
DATA = [
    datum([5, 6, 7, 8, 9, 10], [6, 7, 8, 9, 10, 11], weights=[0.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
    datum([20, 21, 22], [21, 22, 23], weights=[0.0, 1.0, 1.0]),
    datum([30, 31, 32, 33], [31, 32, 33, 34], weights=[1.0, 1.0, 1.0, 1.0]),
]


def nll(data: Sequence[types.Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
    losses = [-(a * b.to(a)).sum() for a, b in zip(logprobs, weights, strict=True)]
    return torch.stack(losses).sum() / 9, {}


def spread(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).square().mean()


def confidence(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).exp().sum()


TERMS = [RegularizerSpec(spread, 0.02, "spread"), RegularizerSpec(confidence, 0.5, "confidence")]


def start() -> LocalTrainingClient:
    return LocalServiceClient(device="cpu").create_lora_training_client(
        "tiny-random", rank=RANK, seed=3
    )


class Remote:
    """The engine with the methods of the SDK's client alone: no `open_pass`, so two passes."""

    def __init__(self, client: LocalTrainingClient) -> None:
        self._client = client
        self.sent: list[str] = []

    def forward(self, data: Any, loss_fn: Any) -> Any:
        self.sent.append("forward")
        return self._client.forward(data, loss_fn)

    def forward_backward(self, data: Any, loss_fn: Any) -> Any:
        self.sent.append("forward_backward")
        return self._client.forward_backward(data, loss_fn)

    def optim_step(self, params: Any) -> Any:
        return self._client.optim_step(params)


def trained(client: Any) -> list[float]:
    wrapped = regularize(client)
    losses = []
    for _ in range(STEPS):
        future = wrapped.forward_backward_custom(DATA, nll, regularizers=TERMS)
        wrapped.optim_step(types.AdamParams(learning_rate=LR)).result()
        losses.append(future.result().loss_total)
    return losses


def by_hand(weights: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    hand = ByHand(weights, RANK, torch.float32)
    optimizer = torch.optim.AdamW(
        hand.weights.values(), lr=LR, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0
    )
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logprobs = hand.logprobs(DATA)
        total = nll(DATA, logprobs)[0] + 0.02 * spread(None, logprobs)
        total = total + 0.5 * confidence(None, logprobs)
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(total.item())
    return losses, {key: value.detach() for key, value in hand.weights.items()}


def test_one_pass_two_passes_and_plain_torch_train_the_same_weights() -> None:
    one, two = start(), start()
    before = one.weights()
    losses, expected = by_hand(before)
    remote = Remote(two)
    assert trained(one) == pytest.approx(losses, rel=1e-5)
    assert trained(remote) == pytest.approx(losses, rel=1e-5)
    assert remote.sent == ["forward", "forward_backward"] * STEPS
    moved = max((expected[key] - before[key]).abs().max().item() for key in before)
    assert moved > LR
    for weights in (one.weights(), two.weights()):
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-5)
