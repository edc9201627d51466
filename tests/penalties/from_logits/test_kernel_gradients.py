"""Gradients of the pieces of a row from its coefficients, against autograd in float64."""

from __future__ import annotations

import pytest
import torch

from tests.penalties.from_logits.cases import by_autograd
from tests.penalties.from_logits.stage_cases import (
    CLASSES,
    DEVICE,
    KINDS,
    LIMITS,
    LOG2_SCALE,
    PIECES,
    TEMPERATURE,
    TILES,
    VECTOR,
    WEIGHTS,
    Row,
    bits_of,
    weights_of,
)
from tests.penalties.from_logits.stage_kernels import gradient_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("single", [False, True])  # by one expression, or one by one
@pytest.mark.parametrize(
    "names", [["entropy", "z_loss", "cross_entropy"], ["forward"], ["reverse", "js"]]
)
def test_gradients_and_inner_products(names: list[str], single: bool) -> None:
    row, scale, pairs = Row(63), 0.5, len(names) * (len(names) + 1) // 2
    compares = bool({"forward", "reverse", "js"} & set(names))
    gz, gr = (torch.full((CLASSES,), torch.nan, device=DEVICE) for _ in range(2))
    gram = torch.full((pairs, PIECES), torch.nan, device=DEVICE)
    gradient_kernel[(PIECES,)](
        row.z, row.r, row.t, gz, gr, gram, row.coefficient_bits(), TILES, CLASSES, PIECES, scale,
        1 / TEMPERATURE, LOG2_SCALE, weights_of(names), LIMITS, KINDS=bits_of(names),
        GR=compares and single, GRAM=single, VECTOR=VECTOR, num_warps=1,
    )  # fmt: skip
    _, exact = by_autograd(
        names, *row.tensors, torch.tensor([scale]).double(), temperature=TEMPERATURE
    )
    signs = {"entropy": -1.0}  # the case is a bonus
    each = {name: [signs.get(name, 1.0) * g[0] for g in exact[name]] for name in names}
    outputs = [gz, gr] if compares and single else [gz]
    for i, found in enumerate(outputs):
        wanted = torch.as_tensor(sum(WEIGHTS[KINDS[name]] * each[name][i] for name in names))
        error = (found.cpu().double() - wanted).norm() / wanted.norm()
        assert error < 1e-5
    if single:
        stacked = torch.stack([each[name][0] for name in names])
        upper = torch.triu_indices(len(names), len(names))
        products = (stacked @ stacked.T)[upper[0], upper[1]]
        torch.testing.assert_close(gram.sum(1).cpu().double(), products, rtol=1e-4, atol=1e-7)
