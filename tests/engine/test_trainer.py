"""Losses and gradients of the trainer, against plain transformers and autograd in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from tests.engine.by_hand import ByHand, datum

from .data import LENGTHS, SMALL, by_hand, close, create, logprobs, ragged, squares, train

RANK = 3
SETTINGS = pytest.mark.parametrize("max_tokens", [None, 8], ids=["whole", "in parts"])


@pytest.fixture
def training(max_tokens: int | None) -> LocalTrainingClient:
    service = LocalServiceClient(dtype="float64", device="cpu", max_tokens=max_tokens)
    client = service.create_lora_training_client("tiny-random", rank=RANK, seed=1)
    # A fresh adapter has B = 0, and then A has no gradient: take a step away from there.
    client.forward_backward([datum([7, 8], [8, 9])], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.05)).result()
    return client


def batch(**fields: Sequence[Sequence[float]]) -> list[types.Datum]:
    tokens = ([5, 6, 7, 8, 9], [10, 11], [12, 13, 14])
    return [
        datum(row, [t + 100 for t in row], **{k: list(v[i]) for k, v in fields.items()})
        for i, row in enumerate(tokens)
    ]


WEIGHTS = ([0.0, 1.0, 0.5, 2.0, 1.0], [1.0, 3.0], [-1.0, 0.0, 0.25])
ADVANTAGES = ([1.0, -1.0, 0.5, 2.0, -0.25], [-2.0, 1.0], [1.0, 1.0, -1.0])
# Far from the model's own, which are near -6.2, so that both ends of the clipping are met.
SAMPLED = ([-6.2, -5.0, -8.0, -6.0, -5.5], [-6.3, -7.5], [-4.0, -6.25, -9.0])


def tensors(values: Sequence[Sequence[float]]) -> list[Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in values]


def cross_entropy(logprobs: Sequence[Tensor]) -> Tensor:
    return torch.stack(
        [-(a * b).sum() for a, b in zip(logprobs, tensors(WEIGHTS), strict=True)]
    ).sum()


def importance_sampling(logprobs: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for p, q, a in zip(logprobs, tensors(SAMPLED), tensors(ADVANTAGES), strict=True):
        total = total - (torch.exp(p - q.float().double()) * a).sum()
    return total


def ppo(logprobs: Sequence[Tensor], low: float = 0.8, high: float = 1.2) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for p, q, a in zip(logprobs, tensors(SAMPLED), tensors(ADVANTAGES), strict=True):
        ratio = torch.exp(p - q.float().double())
        clipped = torch.where(ratio < low, low, torch.where(ratio > high, high, ratio))
        total = total - torch.where(ratio * a < clipped * a, ratio * a, clipped * a).sum()
    return total


def check(client: LocalTrainingClient, data: list[types.Datum], loss: Any, value: float) -> None:
    hand = ByHand(client.weights(), RANK, torch.float64)
    expected = hand.gradients(data, loss)
    assert value == pytest.approx(loss(hand.logprobs(data)).item(), rel=1e-9)
    found = client.gradients()
    assert found.keys() == expected.keys()
    assert max(gradient.abs().max().item() for gradient in expected.values()) > 1e-2
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-8, atol=1e-8)


@SETTINGS
def test_cross_entropy(training: LocalTrainingClient) -> None:
    data = batch(weights=WEIGHTS)
    output = training.forward_backward(data, "cross_entropy").result()
    check(training, data, cross_entropy, output.metrics["loss:sum"])
    assert training.forward(data, "cross_entropy").result().metrics == output.metrics


@SETTINGS
def test_importance_sampling(training: LocalTrainingClient) -> None:
    data = batch(logprobs=SAMPLED, advantages=ADVANTAGES)
    output = training.forward_backward(data, "importance_sampling").result()
    check(training, data, importance_sampling, output.metrics["loss:sum"])


@SETTINGS
@pytest.mark.parametrize("clips", [(0.8, 1.2), (0.3, 3.0)])
def test_ppo(training: LocalTrainingClient, clips: tuple[float, float]) -> None:
    data = batch(logprobs=SAMPLED, advantages=ADVANTAGES)
    config = {"clip_low_threshold": clips[0], "clip_high_threshold": clips[1]}
    output = training.forward_backward(data, "ppo", config).result()
    check(training, data, lambda lp: ppo(lp, *clips), output.metrics["loss:sum"])


@SETTINGS
def test_several_targets_for_each_position(training: LocalTrainingClient) -> None:
    data = [
        datum([1, 2, 3], [[4, 5], [6, 7], [8, 9]], weights=[[1.0, 0.5], [0.0, 2.0], [1.0, 1.0]]),
        datum([4, 5], [[1, 2, 3], [4, 5, 6]], weights=[[1.0, 1.0, 1.0], [0.25, 0.0, -1.0]]),
        datum([9, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6], weights=[1.0] * 6),
    ]

    def loss(logprobs: Sequence[Tensor]) -> Tensor:
        weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
        return torch.stack([-(a * b).sum() for a, b in zip(logprobs, weights, strict=True)]).sum()

    output = training.forward_backward(data, "cross_entropy").result()
    check(training, data, loss, output.metrics["loss:sum"])
    assert [o["logprobs"].shape for o in output.loss_fn_outputs] == [[3, 2], [2, 3], [6]]


@SETTINGS
def test_custom_loss(training: LocalTrainingClient) -> None:
    data = batch()

    def loss(logprobs: Sequence[Tensor]) -> Tensor:
        flat = torch.cat(list(logprobs))
        return flat.exp().sum().sqrt() - flat.mean() * flat.square().sum()

    future = training.forward_backward_custom(data, lambda _, lps: (loss(lps), {"mine": 2.0}))
    metrics = future.result().metrics
    check(training, data, loss, metrics["loss:sum"])
    assert metrics["mine"] == 2.0
    assert set(metrics) == {"mine", "loss:sum", "surrogate_loss:sum"}


@SETTINGS
def test_logprobs_are_those_of_the_targets(training: LocalTrainingClient) -> None:
    data = batch()
    hand = ByHand(training.weights(), RANK, torch.float64).logprobs(data)
    output = training.forward(data, "cross_entropy").result()
    for found, expected in zip(output.loss_fn_outputs, hand, strict=True):
        torch.testing.assert_close(found["logprobs"].to_torch(), expected.detach().float())


def test_the_output_is_that_of_transformers(precise: LocalTrainingClient) -> None:
    data = ragged(1, LENGTHS)
    output = precise.forward(data, "cross_entropy").result()
    assert output.loss_fn_output_type == "TorchLossReturn"
    total = 0.0
    for one, found in zip(data, output.loss_fn_outputs, strict=True):
        targets = one.loss_fn_inputs["target_tokens"].to_torch()
        with torch.no_grad():
            rows = by_hand(precise.weights(), one.model_input.to_ints()).logits[0].log_softmax(-1)
        expected = rows.gather(-1, targets[:, None])[:, 0]
        losses = -expected * one.loss_fn_inputs["weights"].to_torch()
        torch.testing.assert_close(
            found["logprobs"].to_torch().double(), expected, rtol=0, atol=1e-5
        )
        torch.testing.assert_close(
            found["elementwise_loss"].to_torch().double(), losses, rtol=0, atol=1e-4
        )
        total += float(losses.sum())
    assert output.metrics == {"loss:sum": pytest.approx(total, rel=1e-7)}


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("custom", [False, True])
def test_a_batch_split_into_packings_has_the_same_gradients(
    exact: LocalServiceClient, in_parts: LocalServiceClient, width: int | None, custom: bool
) -> None:
    data = ragged(4, LENGTHS, width)
    found = []
    for service in (exact, in_parts):
        client = create(service)
        train(client)
        if custom:
            output = client.forward_backward_custom(data, squares).result()
        else:
            output = client.forward_backward(data, "cross_entropy").result()
        found.append((client.gradients(), output))
    (whole, expected), (parts, output) = found
    close(parts, whole, 1e-11)
    assert output.metrics == {
        key: pytest.approx(value, rel=1e-10) for key, value in expected.metrics.items()
    }
    for ours, theirs in zip(logprobs(output), logprobs(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_targets_of_several_widths_fit_into_one_packing(precise: LocalTrainingClient) -> None:
    data = [*ragged(1, [5, 3], 2), *ragged(2, [4]), *ragged(3, [6], 5)]
    together = precise.forward_backward(data, "cross_entropy").result()
    whole = precise.gradients()
    precise.optim_step(types.AdamParams(learning_rate=0.0)).result()
    for one, found in zip(data, logprobs(together), strict=True):
        output = precise.forward_backward([one], "cross_entropy").result()
        (alone,) = logprobs(output)
        assert alone.shape == one.loss_fn_inputs["target_tokens"].to_torch().shape
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)
    close(precise.gradients(), whole, 1e-11)


@pytest.mark.parametrize("parts", [False, True])
def test_backward_after_a_step_uses_the_new_weights(
    exact: LocalServiceClient, in_parts: LocalServiceClient, parts: bool
) -> None:
    client = create(in_parts if parts else exact)
    train(client)
    data, seen = ragged(4, LENGTHS), []

    def loss(data: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        seen.append([row.detach() for row in rows])
        client.forward_backward(data, "cross_entropy")
        client.optim_step(SMALL).result()
        return squares(data, rows)

    output = client.forward_backward_custom(data, loss).result()
    found = client.gradients()
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    # As the two passes of a remote client: the old gradients of the log-probs, at the new weights.
    leaves = [row.requires_grad_() for row in seen[0]]
    slopes = torch.autograd.grad(squares(data, leaves)[0], leaves)
    sent = [
        datum(
            one.model_input.to_ints(),
            one.loss_fn_inputs["target_tokens"],
            weights=types.TensorData.from_torch(-slope),
        )
        for one, slope in zip(data, slopes, strict=True)
    ]
    expected = client.forward_backward(sent, "cross_entropy").result()
    close(found, client.gradients(), 1e-6)  # the SDK's weights are float32
    for ours, theirs in zip(logprobs(output), logprobs(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert not torch.allclose(logprobs(output)[0].double(), seen[0][0].detach(), atol=1e-3)
