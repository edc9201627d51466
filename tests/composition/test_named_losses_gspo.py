"""GSPO against its formula, and by enumeration of all sequences of a small vocabulary."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steelyard.composition.named_losses import NamedBaseLoss, find_loss

VOCABULARY, LENGTH = 3, 2
SEQUENCES = list(product(range(VOCABULARY), repeat=LENGTH))
REWARDS = [1.0, -0.5, 0.3, 2.0, 0.0, -1.5, 0.7, 0.1, -0.2]
WIDE = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def logprobs_of(theta: Tensor) -> list[Tensor]:
    """Log-probs [2] of the tokens of each sequence, whose second token depends on the first."""
    first, second = theta[0].log_softmax(-1), theta[1:].log_softmax(-1)
    return [torch.stack([first[a], second[a, b]]) for a, b in SEQUENCES]


def policy(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        1 + VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True
    )


def data_from(sampled: list[Tensor]) -> list[Any]:
    return [
        {"loss_fn_inputs": {"logprobs": q.detach(), "advantages": torch.full_like(q, reward)}}
        for q, reward in zip(sampled, REWARDS, strict=True)
    ]


def expected_loss(theta: Tensor, sampled: list[Tensor], settings: Any) -> Tensor:
    """Loss that sampling would have on average: each sequence by its probability."""
    base, losses = NamedBaseLoss.of("gspo", settings), []
    rows = logprobs_of(theta)
    for datum, row, q in zip(data_from(sampled), rows, sampled, strict=True):
        losses.append(q.detach().sum().exp() * base.compute([datum], [row]))
    return torch.stack(losses).sum()


def gradient(of: Tensor, theta: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(of, theta)
    return found


def test_on_policy_its_gradient_is_that_of_the_expected_reward() -> None:
    theta = policy(0)
    rows = logprobs_of(theta)
    probabilities = torch.stack([row.sum().exp() for row in rows])
    reward = (probabilities * torch.tensor(REWARDS, dtype=torch.float64)).sum()
    found = gradient(expected_loss(theta, rows, None), theta)
    torch.testing.assert_close(found, -gradient(reward, theta), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", [None, WIDE])
def test_off_policy_it_is_the_clipped_ratio_of_the_sequences(settings: Any) -> None:
    """Σ q(y) |y| min(s r, clip(s) r) with s = (p(y) / q(y))^(1 / |y|), by finite differences."""
    theta, sampled = policy(1), logprobs_of(policy(2))
    bounds = find_loss("gspo", settings)[1]
    low, high = bounds["clip_low_threshold"], bounds["clip_high_threshold"]

    def objective(at: Tensor) -> float:
        total, then = 0.0, [row.detach() for row in sampled]
        for row, q, reward in zip(logprobs_of(at), then, REWARDS, strict=True):
            ratio = float(np.exp(float((row - q).sum()) / LENGTH))
            clipped = float(np.clip(ratio, low, high))
            total += float(q.sum().exp()) * LENGTH * min(ratio * reward, clipped * reward)
        return total

    loss = expected_loss(theta, sampled, settings)
    assert loss.item() == pytest.approx(-objective(theta.detach()), rel=1e-12)
    found, expected = gradient(loss, theta), torch.zeros_like(theta)
    with torch.no_grad():
        for index in np.ndindex(*theta.shape):
            shift = torch.zeros_like(theta)
            shift[index] = 1e-6
            expected[index] = -(objective(theta + shift) - objective(theta - shift)) / 2e-6
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert found.abs().max() > 0.01


def test_only_tokens_of_the_answer_are_in_the_ratio() -> None:
    """A prompt has a sampling log-prob of 0 or, where data have weights, a weight of 0."""
    answer = {"logprobs": [-1.0, -2.0], "advantages": [1.0, 1.0]}
    now = torch.tensor([-0.9, -2.3])
    wide = {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}
    base = NamedBaseLoss.of("gspo", wide)
    expected = base.compute([{"loss_fn_inputs": answer}], [now])
    assert expected.item() == pytest.approx(-2 * np.exp((0.1 - 0.3) / 2))
    sampled = {"logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, 1.0]}
    weighted = {
        "logprobs": [-7.0, -1.0, -2.0],
        "advantages": [0.0, 1.0, 1.0],
        "weights": [0.0, 1.0, 1.0],
    }
    for fields in (sampled, weighted):
        with_prompt = torch.cat([torch.tensor([-5.0]), now])
        found = base.compute([{"loss_fn_inputs": fields}], [with_prompt])
        assert found.item() == pytest.approx(expected.item())
        loss, _ = find_loss("gspo", wide)
        assert loss.ratio is not None
        tensors = {name: torch.tensor(values) for name, values in fields.items()}
        ratio = loss.ratio(with_prompt, {"weights": torch.ones(3), **tensors})
        assert ratio[0] == 1
        assert ratio[1] == ratio[2] == pytest.approx(np.exp(-0.1))
