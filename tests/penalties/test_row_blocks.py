"""Evaluation in blocks of rows gives the same values and gradients."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.penalties import _reduction, consistency, entropy, js_divergence, kl_divergence

from .backends import TORCH

LOGS = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
FORMULAS: dict[str, Any] = {
    "kl": functools.partial(kl_divergence, direction="symmetric"),
    "js": js_divergence,
    "entropy": functools.partial(entropy, temperature=2.0),
    "cosine": functools.partial(consistency, metric="cosine"),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Blocks of two rows of four; the list records the shapes of the joined results."""
    shapes: list[tuple[int, ...]] = []
    join = torch.cat

    def recording_cat(results: Any) -> Any:
        shapes.extend(tuple(result.shape) for result in results)
        return join(results)

    monkeypatch.setattr(_reduction, "ELEMENTS", 8)
    monkeypatch.setattr(torch, "cat", recording_cat)
    return shapes


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_blocks_give_the_same_values_and_gradients(
    name: str, reduction: str, request: pytest.FixtureRequest
) -> None:
    fn = functools.partial(FORMULAS[name], reduction=reduction)
    arrays = [x.double() for x in LOGS][: 1 if name == "entropy" else 2]
    mask = torch.arange(15).reshape(3, 5) % 4 != 0

    def total(*x: Any) -> Any:
        return fn(*x, mask=mask).sum()

    value, gradients = fn(*arrays, mask=mask), TORCH.gradients(total, *arrays)
    shapes = request.getfixturevalue("small_blocks")
    torch.testing.assert_close(fn(*arrays, mask=mask), value, rtol=1e-12, atol=0)
    assert shapes == [(2,)] * 7 + [(1,)]
    for ours, whole in zip(TORCH.gradients(total, *arrays), gradients, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_blocks_can_be_differentiated_twice(name: str, small_blocks: list[Any]) -> None:
    leaves = [x[0].double().requires_grad_() for x in LOGS][: 1 if name == "entropy" else 2]
    assert torch.autograd.gradgradcheck(FORMULAS[name], leaves)
    assert small_blocks


def test_other_axes_and_small_tensors_are_not_split(small_blocks: list[Any]) -> None:
    entropy(LOGS[0], axis=0)
    entropy(LOGS[0, 0, :3])
    assert small_blocks == []


def test_a_row_longer_than_a_block() -> None:
    x = torch.zeros(2, 2 * _reduction.ELEMENTS)
    torch.testing.assert_close(entropy(x, temperature=2.0), torch.tensor(2.0 * 2**20).log())
