"""Functions over tiles, each in a kernel of its own."""

from __future__ import annotations

import math

import pytest
import torch

from tests.penalties.from_logits.stage_cases import DEVICE
from tests.penalties.from_logits.stage_kernels import (
    copy_kernel,
    log2_kernel,
    ratio_kernel,
    reduce_kernel,
)


@pytest.mark.parametrize(
    ("dtype", "classes", "packed"),
    [
        (torch.float32, 256, False),
        (torch.float32, 301, False),
        (torch.bfloat16, 602, True),
        (torch.float16, 602, True),
        (torch.bfloat16, 603, False),
    ],
)
def test_a_row_is_loaded_and_stored_unchanged(
    dtype: torch.dtype, classes: int, packed: bool
) -> None:
    x = torch.randn(classes + 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3] = -torch.inf
    x = x.to(DEVICE)
    y = torch.full_like(x, 7.0)
    copy_kernel[(1,)](x, y, classes, VECTOR=16 // x.element_size(), PACKED=packed, num_warps=1)
    torch.testing.assert_close(y[:classes], x[:classes], rtol=0, atol=0)
    assert torch.all(y[classes:] == 7)  # nothing is written after the row


def test_sums_maxima_and_inner_products_by_thread() -> None:
    vector = 4
    made = torch.Generator().manual_seed(2)
    x, y = (torch.randn(64 * vector, generator=made).to(DEVICE) for _ in range(2))
    out = torch.empty(3, 32, device=DEVICE)
    reduce_kernel[(1,)](x, y, out, VECTOR=vector, num_warps=1)
    # Thread i holds the classes from i * vector in either half.
    a, b = (each.reshape(2, 32, vector).transpose(0, 1).reshape(32, -1) for each in (x, y))
    torch.testing.assert_close(out[0], a.sum(1))
    torch.testing.assert_close(out[1], a.amax(1), rtol=0, atol=0)
    torch.testing.assert_close(out[2], (a * b).sum(1))


def test_the_limit_of_a_log_ratio() -> None:
    p = torch.tensor([0.5, 0.5, 0.5, 0.0], device=DEVICE)
    d = torch.tensor([1.0, 3.0, -1e30, 1e30], device=DEVICE)
    ratio, inside = torch.empty(4, device=DEVICE), torch.empty(4, device=DEVICE)
    ratio_kernel[(1,)](p, d, ratio, inside, 2.0, COUNT=4)
    assert ratio.tolist() == [1.0, 2.0, -2.0, 0.0]  # without probability it does not count
    assert inside.tolist() == [1.0, 0.0, 0.0, 0.0]
    ratio_kernel[(1,)](p[:1].expand(4).contiguous(), d, ratio, inside, math.inf, COUNT=4)
    assert ratio[3] == math.inf  # LOG_ZERO on the other side


def test_the_fast_logarithm() -> None:
    x = torch.tensor([0.25, 1.0, 1.5, 1e-30], device=DEVICE)
    y = torch.empty(4, device=DEVICE)
    log2_kernel[(1,)](x, y, COUNT=4)
    torch.testing.assert_close(y, x.double().log2().float(), rtol=1e-5, atol=1e-6)
