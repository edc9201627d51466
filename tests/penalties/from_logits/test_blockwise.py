"""The sweep over blocks of rows against autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from array_api_compat import numpy as numpy_namespace
from array_api_compat import torch as torch_namespace

from steelyard.penalties.from_logits import (
    compose_logits,
)
from steelyard.penalties.from_logits._components import REVERSE, Z_LOSS, Component
from steelyard.penalties.from_logits._formulas import Wants, sweep
from tests.penalties.backends import Backend
from tests.penalties.from_logits.cases import arguments, by_autograd, inputs, written


def test_blocks_of_rows_equal_one_sweep(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    logits, reference, targets = inputs(15, 10, 12)
    z, r, t = arguments(backend, logits, reference, targets)

    def everything() -> list[Any]:
        found = compose_logits(
            z, written(["reverse", "js"]), reference=r, targets=t, track_grad_norms=True
        )  # fmt: skip
        return [found.total, found.gradient, *found.grad_norms.values()]

    whole = everything()
    monkeypatch.setattr("steelyard.penalties.from_logits._formulas.ELEMENTS", 36)
    for a, b in zip(everything(), whole, strict=True):
        np.testing.assert_allclose(backend.numpy(a), backend.numpy(b), rtol=1e-12)


@pytest.mark.parametrize("module", [numpy_namespace, torch_namespace])
def test_a_sweep_against_autograd(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighted total, gradients by both inputs, inner products; a row of scale 0 holds NaN."""
    monkeypatch.setattr("steelyard.penalties.from_logits._formulas.ELEMENTS", 14)
    logits, reference, targets = inputs(53, 5, 7)
    scale = torch.tensor([1.0, 0.5, 0.0, 2.0, -1.0], dtype=torch.float64)
    names = ["reverse", "z_loss"]
    values, gradients = by_autograd(names, logits, reference, targets, scale)
    logits[2] = torch.nan
    arrays: list[Any] = [logits, reference, targets, scale]
    if module is numpy_namespace:
        arrays = [x.numpy() for x in arrays]
    components = [Component(REVERSE, 1.0, 100.0), Component(Z_LOSS, 1.0)]
    z, r, t, share = arrays
    wants = Wants(logits=True, reference=True, gram=True)
    found = sweep(module, z, r, t, share, components, [2.0, -3.0], wants)
    sums = np.asarray(found.values).sum(-1)
    wanted = [float(values[name]) for name in names]
    np.testing.assert_allclose(sums, [*wanted, 2 * wanted[0] - 3 * wanted[1]], rtol=1e-12)
    for i, own in enumerate((found.logits, found.reference)):
        exact = 2 * gradients["reverse"][i] - 3 * gradients["z_loss"][i]
        np.testing.assert_allclose(np.asarray(own), exact.numpy(), rtol=1e-9, atol=1e-14)
    each = torch.stack([gradients[name][0].flatten() for name in names])
    np.testing.assert_allclose(np.asarray(found.gram), (each @ each.T).numpy(), rtol=1e-9)


def test_outputs_that_are_not_wanted_are_none() -> None:
    logits, reference, targets = inputs(54, 3, 4)
    components = [Component(Z_LOSS, 1.0)]
    found = sweep(
        torch_namespace, logits, reference, targets, None, components, [1.0], Wants(logits=True)
    )
    assert found.reference is None
    assert found.gram is None
    assert found.logits is not None
    assert (Wants().any, Wants(gram=True).any) == (False, True)
