"""Several terms over the same logits: against single terms and against autograd."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.penalties.from_logits import (
    compose_logits,
)
from tests.penalties.backends import Backend
from tests.penalties.from_logits.cases import PLANS, TERMS, arguments, by_autograd, inputs, written

EVERY = list(TERMS)


@pytest.mark.parametrize(
    ("names", "reduction"),
    [(EVERY, "mean"), (["cross_entropy", "entropy", "z_loss", "reverse"], "sum")],
)
def test_everything_against_autograd(backend: Backend, names: list[str], reduction: Any) -> None:
    logits, reference, targets = inputs(11, 6, 23, hard=True)
    z, r, t = arguments(backend, logits, reference, targets)
    kept = np.array([True, True, False, True, True, True])
    scale = torch.as_tensor(kept / (kept.sum() if reduction == "mean" else 1))
    values, gradients = by_autograd(names, logits, reference, targets, scale)
    found = compose_logits(
        z, written(names), reference=r, targets=t, mask=backend.mask(kept), reduction=reduction,
        track_grad_norms=True,
    )  # fmt: skip
    weights = {name: TERMS[name]["weight"] for name in names}
    gradient = sum(weights[name] * gradients[name][0] for name in names)
    assert isinstance(gradient, torch.Tensor)
    total = sum(weights[name] * float(values[name]) for name in names)
    np.testing.assert_allclose(backend.numpy(found.total), total, rtol=1e-12)
    np.testing.assert_allclose(backend.numpy(found.gradient), gradient, rtol=1e-9, atol=1e-14)
    assert list(found.values) == names
    for name in names:
        own = gradients[name][0]
        np.testing.assert_allclose(backend.numpy(found.values[name]), values[name], rtol=1e-12)
        np.testing.assert_allclose(backend.numpy(found.grad_norms[name]), own.norm(), rtol=1e-9)
    np.testing.assert_allclose(backend.numpy(found.grad_norms["total"]), gradient.norm(), rtol=1e-9)
    assert list(found.cosines) == list(combinations(names, 2))
    for (a, b), cosine in found.cosines.items():
        wanted = torch.nn.functional.cosine_similarity(
            gradients[a][0].flatten(), gradients[b][0].flatten(), dim=0
        )
        np.testing.assert_allclose(backend.numpy(cosine), wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("pair", list(combinations_with_replacement(EVERY, 2)))
def test_every_pair_with_respect_to_both(pair: tuple[str, str]) -> None:
    names = list(dict.fromkeys(pair))
    logits, reference, targets = inputs(12, 5, 17, hard=False)
    scale = torch.full((5,), 0.2, dtype=torch.float64)
    _, gradients = by_autograd(names, logits, reference, targets, scale)
    z, r = logits.requires_grad_(), reference.requires_grad_()
    found = compose_logits(z, written(names), reference=r, targets=targets)
    (0.5 * found.total).backward()
    for i, x in enumerate((z, r)):
        wanted = sum(0.5 * TERMS[name]["weight"] * gradients[name][i] for name in names)
        own = torch.zeros_like(x) if x.grad is None else x.grad
        torch.testing.assert_close(own, torch.as_tensor(wanted), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("terms", PLANS)
@pytest.mark.parametrize("step", [0, 1, 3])
def test_weights_may_follow_schedules(terms: Any, step: int, backend: Backend) -> None:
    z, _, _ = arguments(backend, *inputs(44, 4, 9))
    fixed = compose_logits(
        z, [("entropy", step / 4), ("z_loss", 1 - step / 2)], track_grad_norms=True
    )
    found = compose_logits(z, terms, step=step, track_grad_norms=True)
    np.testing.assert_allclose(backend.numpy(found.total), backend.numpy(fixed.total), rtol=1e-12)
    for name, norm in fixed.grad_norms.items():
        np.testing.assert_allclose(
            backend.numpy(found.grad_norms[name]), backend.numpy(norm), rtol=1e-12
        )


def test_a_schedule_inside_torch_compile() -> None:
    z = inputs(46, 4, 9, torch.float32)[0]

    def total(z: torch.Tensor, step: int) -> torch.Tensor:
        found: torch.Tensor = compose_logits(z, PLANS[0], step=step).total
        return found

    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    for step in (0, 3):
        torch.testing.assert_close(compiled(z, step), total(z, step))
