"""Likelihood of data as a term."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from steelyard.errors import InputError
from steelyard.regularizers import NLL


def test_the_mean_over_the_tokens_that_count() -> None:
    data = [{"loss_fn_inputs": {"weights": [0.0, 1.0]}}, {"loss_fn_inputs": {"weights": [1.0]}}]
    value = NLL().compute(data, [torch.tensor([-9.0, -1.0]), torch.tensor([-2.0])])
    assert value.item() == pytest.approx(1.5)


def test_it_is_torch_s_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (7,), generator=generator)
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    value = NLL().compute([], [logprobs[:3], logprobs[3:]])
    expected = F.cross_entropy(logits, targets)
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_classes_are_refused() -> None:
    with pytest.raises(InputError, match=r"must have the shape \[T\]"):
        NLL().compute([], [torch.zeros(2, 3)])
