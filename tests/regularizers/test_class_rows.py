"""The traceable formulas are those of `penalties`, in value and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import penalties
from steelyard.regularizers._class_rows import entropy_rows, js_rows, kl_rows

INF = torch.inf
P = (
    torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.1, 0.9, 0.0], [0.4, 0.4, 0.2]])
    .double()
    .log()
)
R = (
    torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [0.9, 0.1, 0.0], [0.1, 0.2, 0.7]])
    .double()
    .log()
)
FORMULAS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any]]] = {
    "kl": (
        lambda p: kl_rows(p, R, "forward"),
        lambda p: penalties.kl_divergence(p, R, reduction="none"),
    ),
    "reverse kl": (
        lambda p: kl_rows(p, R, "reverse"),
        lambda p: penalties.kl_divergence(p, R, direction="reverse", reduction="none"),
    ),
    "symmetric kl": (
        lambda p: kl_rows(p, R, "symmetric"),
        lambda p: penalties.kl_divergence(p, R, direction="symmetric", reduction="none"),
    ),
    "js": (
        lambda p: js_rows(p, R),
        lambda p: penalties.js_divergence(p, R, reduction="none"),
    ),
    "entropy": (entropy_rows, lambda p: penalties.entropy(p, reduction="none")),
    "warm entropy": (
        lambda p: entropy_rows(p, 1.7),
        lambda p: penalties.entropy(p, temperature=1.7, reduction="none"),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients_are_those_of_penalties(name: str) -> None:
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for formula, results in zip(FORMULAS[name], (found, expected), strict=True):
        leaf = P.clone().requires_grad_()
        rows = formula(leaf)
        results += [rows.detach(), *torch.autograd.grad(rows.sum(), leaf)]
    torch.testing.assert_close(found, expected)
    assert all(bool(each.isfinite().all()) for each in found)
