"""Norms and cosines of the terms' gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from array_api_compat import numpy as xp
from torch._subclasses import FakeTensorMode

from steelyard.penalties.from_logits import (
    compose_logits,
)
from steelyard.penalties.from_logits.compose import grad_norms_and_cosines
from tests.penalties.from_logits.cases import by_autograd, inputs, written


def test_norms_of_a_mean_without_a_mask() -> None:
    logits, reference, targets = inputs(18, 4, 9)
    scale = torch.full((4,), 0.25, dtype=torch.float64)
    _, gradients = by_autograd(["reverse"], logits, reference, targets, scale)
    found = compose_logits(logits, written(["reverse"]), reference=reference, track_grad_norms=True)
    torch.testing.assert_close(found.grad_norms["reverse"], gradients["reverse"][0].norm())


def test_a_zero_gradient_has_norm_and_cosine_0() -> None:
    """At p = q the gradient of a divergence is 0."""
    z = torch.zeros(2, 4)
    found = compose_logits(z, ["kl", "z_loss"], reference=z.clone(), track_grad_norms=True)
    assert found.grad_norms["kl"] == 0
    assert found.cosines["kl", "z_loss"] == 0


def test_fake_tensors_are_not_cached() -> None:
    """A later call with the same terms must not find a tensor without data in the cache."""
    terms: list[Any] = [("entropy", {"weight": 0.123}), "z_loss"]
    with FakeTensorMode():
        compose_logits(torch.zeros(2, 5), terms, track_grad_norms=True)
    found = compose_logits(torch.zeros(2, 5), terms, track_grad_norms=True)
    assert type(found.grad_norms["z_loss"]) is torch.Tensor


def test_an_infinite_term_does_not_change_the_norms_of_others() -> None:
    z, reference = torch.randn(2, 5), torch.zeros(2, 5)
    reference[0, 3] = -torch.inf
    terms: list[Any] = [("kl", {"max_log_ratio": None}), "entropy"]
    found = compose_logits(z, terms, reference=reference, track_grad_norms=True)
    alone = compose_logits(z, ["entropy"], track_grad_norms=True)
    assert found.values["kl"] == torch.inf
    assert found.grad_norms["kl"].isnan()
    torch.testing.assert_close(found.grad_norms["entropy"], alone.grad_norms["entropy"])


def test_a_term_without_components_has_norm_0() -> None:
    """The normalized entropy of one class is 0, next to a term that is infinite."""
    z = torch.full((2, 1), -torch.inf)
    found = compose_logits(
        z, [("entropy", {"normalize": True}), "z_loss"], track_grad_norms=True
    )  # fmt: skip
    assert found.values["entropy"].shape == ()
    assert found.values["entropy"] == 0
    assert found.values["z_loss"] == torch.inf
    assert found.grad_norms["entropy"] == 0


def test_norms_and_cosines_by_hand() -> None:
    """Components with gradients (1, 0) and (1, 1); terms a = first, b = 2 · first - second."""
    gram = np.array([[1.0, 1.0], [1.0, 2.0]])
    shares = [[1.0, 0.0], [2.0, -1.0], [3.0, 1.0]]  # last, the total: (4, 1)
    norms, cosines = grad_norms_and_cosines(xp, ["a", "b"], shares, gram)
    assert {name: float(norm) for name, norm in norms.items()} == pytest.approx(
        {"a": 1.0, "b": 2**0.5, "total": 17**0.5}
    )
    assert float(cosines["a", "b"]) == pytest.approx(1 / 2**0.5)
