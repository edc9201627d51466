"""The projector of UPGrad and DualProj, against TorchJD's own."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torchjd.linalg import PSDMatrix, QuadprogProjector

from steelyard.composition.dual_cone import DirectProjector


@pytest.mark.parametrize("count", [2, 3, 6, 12])
@pytest.mark.parametrize("settings", [{}, {"norm_eps": 0.0, "reg_eps": 1e-6}, {"norm_eps": 1e3}])
def test_its_projections_are_those_of_torchjd(count: int, settings: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(count)
    conflicts = 0
    for _ in range(20):
        rows = torch.randn(count, 5, generator=generator, dtype=torch.float64)
        products, wanted = rows @ rows.T, torch.rand(count, generator=generator).double()
        for u in (wanted, torch.diag(wanted)):
            theirs = QuadprogProjector(**settings)(u, cast("PSDMatrix", products))
            torch.testing.assert_close(
                DirectProjector(**settings)(u, products), theirs, rtol=1e-9, atol=1e-9
            )
            conflicts += not torch.equal(theirs, u)
    assert conflicts > 20 or "norm_eps" in settings


def test_a_combination_without_conflict_is_its_own_projection() -> None:
    products = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    u = torch.tensor([0.5, 2.0], dtype=torch.float64)
    assert DirectProjector()(u, products).tolist() == [0.5, 2.0]
