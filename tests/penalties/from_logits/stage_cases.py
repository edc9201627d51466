"""One row of logits in pieces, with its statistics and coefficients by NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from steelyard.penalties.from_logits import _triton_components as components
from steelyard.penalties.from_logits import _triton_tiles as signals
from tests.penalties.from_logits.cases import inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES, VECTOR, TILES = 700, 4, 1  # in float32 a tile is 256 classes: three pieces
PIECES = 3
TEMPERATURE = 1.25
LOG2_SCALE = np.log2(np.e) / TEMPERATURE
KINDS = {"entropy": 0, "forward": 1, "reverse": 2, "js": 3, "z_loss": 4, "cross_entropy": 5}
WEIGHTS = (0.5, 0.7, -0.3, 2.0, 0.1, 1.5)
LIMITS = (float("inf"), 100.0, 100.0, float("inf"), float("inf"), float("inf"))

Floats = npt.NDArray[np.float64]


def bits_of(names: list[str]) -> int:
    return sum(1 << KINDS[name] for name in names)


def weights_of(names: list[str]) -> tuple[float, ...]:
    """Weights by kind, 0 for kinds that are not computed, as `_launch.sweep` passes them."""
    return tuple(w if name in names else 0.0 for name, w in zip(KINDS, WEIGHTS, strict=True))


class Row:
    """A row of logits, reference and target in float32, and the same numbers in float64."""

    def __init__(self, seed: int) -> None:
        z, r, t = inputs(seed, 1, CLASSES, torch.float32)
        self.z, self.r, self.t = z.to(DEVICE), r.to(DEVICE), t.to(DEVICE)
        self.tensors = (z, r, t)
        self.x, self.y = (self._scaled(each) for each in (z, r))
        self.p, self.q = (np.exp2(each - self._lse(each)) for each in (self.x, self.y))

    @staticmethod
    def _scaled(x: torch.Tensor) -> Floats:
        return np.asarray(x[0].double().numpy() * LOG2_SCALE, dtype=np.float64)

    @staticmethod
    def _lse(x: Floats) -> float:
        return float(np.log2(np.exp2(x - x.max()).sum()) + x.max())

    def statistics(self, names: list[str]) -> torch.Tensor:
        """What the pieces publish, `[statistics, PIECES]`."""
        cuts = [slice(256 * i, 256 * (i + 1)) for i in range(PIECES)]
        columns = [self._piece(self.x[cut], self.y[cut], names) for cut in cuts]
        return torch.tensor(np.array(columns).T.copy(), dtype=torch.float32)

    @staticmethod
    def _piece(x: Floats, y: Floats, names: list[str]) -> list[float]:
        e, f, d = np.exp2(x - x.max()), np.exp2(y - y.max()), (x - x.max()) - (y - y.max())
        numbers = [x.max(), e.sum()]
        if {"forward", "reverse", "js"} & set(names):
            numbers += [y.max(), f.sum()]
        if "entropy" in names:
            numbers.append(e @ (x - x.max()))
        if "forward" in names:
            numbers.append(e @ d)
        if "reverse" in names:
            numbers.append(-f @ d)
        if {"forward", "reverse"} & set(names):
            numbers.append(np.abs(d).max())
        return [float(number) for number in numbers]

    def coefficients(self) -> dict[int, float]:
        """All coefficients of the row, by place."""
        ratio, mean = np.log2(self.p / self.q), (self.p + self.q) / 2
        top, top_r = float(self.x.max()), float(self.y.max())
        by_name: list[tuple[Any, Any]] = [
            (signals.Z_TOP, top),
            (signals.Z_LEVEL, self._lse(self.x) - top),
            (signals.R_TOP, top_r),
            (signals.R_LEVEL, self._lse(self.y) - top_r),
            (components.H, -self.p @ np.log2(self.p)),
            (components.K_F, self.p @ ratio),
            (components.MASS_F, 1.0),
            (components.K_R, -self.q @ ratio),
            (components.MASS_R, 1.0),
            (components.LIMIT_HIT, 0.0),
            (components.K_P, self.p @ np.log2(self.p / mean)),
            (components.K_Q, self.q @ np.log2(self.q / mean)),
        ]
        return {int(place.value): float(number) for place, number in by_name}

    def coefficient_bits(self) -> torch.Tensor:
        """The coefficients as the programs publish them."""
        numbers = self.coefficients()
        row = torch.tensor([numbers[place] for place in sorted(numbers)], dtype=torch.float32)
        return row.view(torch.int32).to(DEVICE)


def unset(*shape: int) -> torch.Tensor:
    """Memory in which nothing is published yet."""
    return torch.full(shape, -1, dtype=torch.int32, device=DEVICE)
