"""Values and coefficients of a row from the statistics of its pieces."""

from __future__ import annotations

import pytest
import torch

from steelyard.penalties.from_logits._triton_components import COEFFICIENTS
from tests.penalties.from_logits.cases import by_autograd
from tests.penalties.from_logits.stage_cases import (
    CLASSES,
    DEVICE,
    KINDS,
    LIMITS,
    LOG2_SCALE,
    PIECES,
    TEMPERATURE,
    WEIGHTS,
    Row,
    bits_of,
    unset,
    weights_of,
)
from tests.penalties.from_logits.stage_kernels import combine_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    "names",
    [["entropy", "z_loss", "cross_entropy"], ["forward", "reverse"], ["entropy", "reverse"]],
)
def test_values_total_and_coefficients(names: list[str]) -> None:
    row, count, scale = Row(62), len(names), 0.5
    values = torch.full((count + 1,), torch.nan, device=DEVICE)
    coefs = unset(COEFFICIENTS.value)
    stats = row.statistics(names).view(torch.int32).to(DEVICE)
    combine_kernel[(1,)](
        row.z, row.r, row.t, values, coefs, stats, CLASSES, PIECES, scale, LOG2_SCALE,
        weights_of(names), LIMITS, KINDS=bits_of(names), COUNT=count, PIECES=4, num_warps=1,
    )  # fmt: skip
    exact, _ = by_autograd(
        names, *row.tensors, torch.tensor([scale]).double(), temperature=TEMPERATURE
    )
    signs = {"entropy": -1.0}  # the case is a bonus
    wanted = [signs.get(name, 1.0) * float(exact[name]) for name in names]
    total = sum(WEIGHTS[KINDS[name]] * each for name, each in zip(names, wanted, strict=True))
    assert values.cpu().tolist() == pytest.approx([*wanted, total], rel=1e-4)
    numbers = row.coefficients()
    found = coefs.cpu()
    for place in range(COEFFICIENTS.value):
        if found[place] != -1:  # of these kinds
            number = float(found[place].view(torch.float32))
            assert number == pytest.approx(numbers[place], rel=1e-4, abs=1e-4)
    assert (found != -1).sum() >= 2
