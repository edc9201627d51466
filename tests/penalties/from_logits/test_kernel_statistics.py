"""Statistics of the pieces of a row, against NumPy in float64."""

from __future__ import annotations

import pytest
import torch

from tests.penalties.from_logits.stage_cases import (
    CLASSES,
    DEVICE,
    LOG2_SCALE,
    PIECES,
    TILES,
    VECTOR,
    Row,
    bits_of,
    unset,
)
from tests.penalties.from_logits.stage_kernels import statistics_kernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def published(z: torch.Tensor, r: torch.Tensor, names: list[str], count: int) -> torch.Tensor:
    stats = unset(count, PIECES)
    statistics_kernel[(PIECES,)](
        z, r, stats, TILES, CLASSES, PIECES, LOG2_SCALE, KINDS=bits_of(names), VECTOR=VECTOR,
        num_warps=1,
    )  # fmt: skip
    return stats.view(torch.float32).cpu()


@pytest.mark.parametrize(
    "names", [["entropy"], ["cross_entropy"], ["js"], ["entropy", "forward", "reverse"]]
)
def test_statistics_of_each_piece(names: list[str]) -> None:
    row = Row(61)
    wanted = row.statistics(names)
    found = published(row.z[0], row.r[0], names, len(wanted))
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-4)


def test_a_first_tile_of_minus_infinity() -> None:
    """With two tiles in a piece, the first of them -inf, the shift is that of the second."""
    z = torch.full((CLASSES,), -torch.inf)
    z[300:600] = torch.linspace(-1, 1, 300)
    stats = unset(3, 2)
    statistics_kernel[(2,)](
        z.to(DEVICE), z.to(DEVICE), stats, 2, CLASSES, 2, LOG2_SCALE, KINDS=1, VECTOR=VECTOR,
        num_warps=1,
    )  # fmt: skip
    top, total, moment = stats.view(torch.float32).cpu()[:, 0]
    x = z[256:512].double() * LOG2_SCALE
    x = x[x > -torch.inf]
    torch.testing.assert_close(top.double(), x.max())
    torch.testing.assert_close(total.double(), (x - x.max()).exp2().sum())
    torch.testing.assert_close(moment.double(), ((x - x.max()) * (x - x.max()).exp2()).sum())


def test_a_sum_that_overflows_is_computed_again() -> None:
    """A logit that is larger by 200 than the first tile's maximum."""
    z = torch.zeros(CLASSES)
    z[300] = 200.0
    stats = unset(2, 2)
    statistics_kernel[(2,)](
        z.to(DEVICE), z.to(DEVICE), stats, 2, CLASSES, 2, LOG2_SCALE, KINDS=1 << 4, VECTOR=VECTOR,
        num_warps=1,
    )  # fmt: skip
    top, total = stats.view(torch.float32).cpu()[:, 0]
    torch.testing.assert_close(float(top), 200 * LOG2_SCALE)
    assert float(total) == pytest.approx(1.0, rel=1e-4)
