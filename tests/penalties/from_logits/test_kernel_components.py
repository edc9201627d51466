"""Kinds as bits, the layout of the statistics, and the middle pass of JS."""

from __future__ import annotations

import pytest
import torch

from steelyard.penalties.from_logits import _triton_components as components
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    ENTROPY,
    FORWARD,
    JS,
    REVERSE,
    Z_LOSS,
)
from tests.penalties.from_logits.cases import expected
from tests.penalties.from_logits.stage_cases import (
    CLASSES,
    DEVICE,
    LOG2_SCALE,
    PIECES,
    TEMPERATURE,
    TILES,
    VECTOR,
    WEIGHTS,
    Row,
    bits_of,
    unset,
    weights_of,
)
from tests.penalties.from_logits.stage_kernels import middle_kernel


def test_kinds_as_bits() -> None:
    assert components.WITH_REFERENCE.value == (1 << FORWARD) | (1 << REVERSE) | (1 << JS)
    assert components.WITH_TARGETS.value == 1 << CROSS_ENTROPY
    assert components.KIND_COUNT.value == 6


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        ([Z_LOSS, CROSS_ENTROPY], 2),
        ([ENTROPY], 3),
        ([FORWARD], 6),
        ([ENTROPY, FORWARD, REVERSE], 8),
        ([JS], 6),
    ],
)
def test_numbers_that_a_piece_publishes(kinds: list[int], count: int) -> None:
    assert components.statistics_count(kinds) == count


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_js_from_the_middle_pass() -> None:
    row, scale = Row(64), 0.5
    names = ["entropy", "js"]  # the value of JS is the second, its total the last
    values = torch.full((4,), torch.nan, device=DEVICE)
    coefs = row.coefficient_bits()
    coefs[components.K_P.value :] = -1
    middle_kernel[(PIECES,)](
        row.z, row.r, values, coefs, unset(2, PIECES), TILES, CLASSES, PIECES, scale, LOG2_SCALE,
        weights_of(names), KINDS=bits_of(names), COUNT=2, VECTOR=VECTOR, PIECES=4, num_warps=1,
    )  # fmt: skip
    z, r, t = row.tensors
    js = scale * float(expected("js", z.double(), r.double(), t, temperature=TEMPERATURE)[0])
    assert values[1].item() == pytest.approx(js, rel=1e-5)
    assert values[3].item() == pytest.approx(WEIGHTS[JS] * js, rel=1e-5)
    numbers = row.coefficients()
    for place in (components.K_P.value, components.K_Q.value):
        assert float(coefs[place].view(torch.float32)) == pytest.approx(numbers[place], rel=1e-4)
