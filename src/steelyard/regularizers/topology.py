"""Topology: the persistent homology of points that each datum gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from steelyard._extras import require
from steelyard.errors import InputError
from steelyard.gradients import LogProbs, as_tensor
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import DatumRow, rows_of
from steelyard.spec import title

MAX_DIMENSION = 2


@dataclass(frozen=True, kw_only=True)
class TopologicalConsistency:
    """Total persistence of the points of each datum: how much shape they have.

    Over the bars (b, d) of the Vietoris-Rips filtration in the chosen dimensions that die,
    `Σ (d - b)^power` for each datum, averaged over data. Dimension 0 measures how far apart the
    points' clusters are, dimension 1 their loops.

    With `differentiable=True`, where the points are computed from the log-probs, **the gradient
    is exact** wherever no two distances are equal: each b and d is the distance of two points.
    With `differentiable=False` the term returns one penalty per datum and **the gradient is the
    score-function estimate**: unbiased for the expected penalty if the data were sampled from
    the model being trained; on fixed data a push that makes data with much persistence less
    likely.

    It runs in a process unless its spec says otherwise: the points function, the data and the
    log-probs travel there, and the gradient comes back.

    Reads from each datum: what `points` reads; `weights` (optional), where 0 leaves a token out.

    Args:
        points: a function `(datum, logprobs)`, or its `"package.module:attr"`, that gives the
            `[N, D]` points of a datum; `logprobs` are those of the tokens that count.
        dimensions: the homology dimensions that count, among 0, 1 and 2; a number or several.
        power: the power of each bar's length, at least 1.
        max_edge: distances above it make no edge; bars that live so long do not count.
        scale: the distance at which Betti numbers are counted; None: the median distance.
        differentiable: whether the points depend on the log-probs through torch.

    Raises:
        SpecError: an option breaks its rule.
        MissingExtraError: GUDHI is not installed.

    Example:
        >>> square = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> shape = TopologicalConsistency(points=lambda datum, lp: lp.sum() * square)
        >>> loss, metrics = shape.compute([None], [torch.tensor([-2.0], requires_grad=True)])
        >>> print(f"{loss:.4f}")  # one loop, born at 2, filled in at 2√2
        0.8284

    References:
        Edelsbrunner & Harer (2010), "Computational topology"; Carrière et al. (2021),
        "Optimizing persistent homology based functions" (the gradient); the GUDHI project.
    """

    points: Callable[..., Any]
    dimensions: int | Sequence[int] = 1
    power: float = 1.0
    max_edge: float = math.inf
    scale: float | None = None
    differentiable: bool = True
    name: ClassVar[str] = "topological_consistency"
    run_in: ClassVar[str] = "process"

    def __post_init__(self) -> None:
        name = self.name
        object.__setattr__(self, "points", _options.function("points", self.points, name))
        given = self.dimensions
        several = isinstance(given, Sequence) and not isinstance(given, str)
        dimensions = tuple(given) if several else (given,)  # type: ignore[arg-type]  # several
        known = bool(dimensions) and all(
            isinstance(d, int) and not isinstance(d, bool) and 0 <= d <= MAX_DIMENSION
            for d in dimensions
        )
        _options.require(known, "dimensions", "among 0, 1 and 2", given, name)
        object.__setattr__(self, "dimensions", tuple(sorted(set(dimensions))))
        _options.at_least("power", self.power, 1, name)
        if self.max_edge != math.inf:
            _options.positive("max_edge", self.max_edge, name)
        if self.scale is not None:
            _options.positive("scale", self.scale, name)
        _options.flag("differentiable", self.differentiable, name)
        require("gudhi", title(name))

    @property
    def gradient(self) -> str:
        """`"autograd"` if the points depend on the log-probs, else `"score"`."""
        return "autograd" if self.differentiable else "score"

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Any, dict[str, float]]:
        """The penalty, one per datum if not differentiable; mean Betti numbers, and `bars`."""
        totals, betti, bars = [], [], []
        for row in rows_of(data, logprobs, classes=True):
            points = self._checked(self.points(row.datum, row.kept), row)
            diagram = _Diagram(points, self.dimensions, self.max_edge)  # type: ignore[arg-type]  # a tuple
            lengths = diagram.lengths(points)
            totals.append(lengths.pow(self.power).sum())
            betti.append(diagram.betti(self.scale))
            bars.append(len(lengths))
        numbers = np.mean(betti, axis=0)
        metrics = {f"betti_{k}": float(number) for k, number in enumerate(numbers)}
        metrics["bars"] = float(np.mean(bars))
        penalties = torch.stack(totals)
        return penalties.mean() if self.differentiable else penalties, metrics

    def _checked(self, given: Any, row: DatumRow) -> Tensor:
        points, index = as_tensor(given), row.index
        if points.dim() != 2 or not points.is_floating_point():  # noqa: PLR2004 - [N, D]
            raise InputError(
                f"the points of datum {index} must be floating-point numbers of the shape [N, D], "
                f"got {points.dtype} of the shape {list(points.shape)}."
            )
        if not bool(points.isfinite().all()):
            raise InputError(f"the points of datum {index} must be finite, got NaN or infinity.")
        if self.differentiable and row.logprobs.requires_grad and not points.requires_grad:
            raise InputError(
                f"the points of datum {index} must be computed from the log-probs through torch, "
                f"got some with no path to them: build the regularizer with differentiable=False "
                f"for a score-function gradient."
            )
        return points if self.differentiable else points.detach()


class _Diagram:
    """The persistence of a cloud of points, and which distances each bar is made of."""

    def __init__(self, points: Tensor, dimensions: Sequence[int], max_edge: float) -> None:
        import gudhi  # noqa: PLC0415 - an extra

        cloud = points.detach().cpu().double()
        distances = torch.cdist(cloud, cloud, compute_mode="donot_use_mm_for_euclid_dist")
        self._distances = distances.numpy()
        self._dimensions = dimensions
        top = max(dimensions)
        self._highest = top
        tree = gudhi.SimplexTree.create_from_array(self._distances, max_filtration=max_edge)
        tree.expansion(top + 1)
        # Otherwise the bars of the highest dimension there is are left out, as unfinished.
        tree.compute_persistence(persistence_dim_max=tree.dimension() <= top)
        self._tree = tree

    def lengths(self, points: Tensor) -> Tensor:
        """The lengths of the bars that die, as a function of the points."""
        low, high, _, _ = self._tree.flag_persistence_generators()
        found = []
        for dimension in self._dimensions:
            if dimension == 0 and len(low):
                found.append(_distance(points, low[:, 1], low[:, 2]))
            elif 0 < dimension <= len(high) and len(high[dimension - 1]):
                pairs = high[dimension - 1]
                births = _distance(points, pairs[:, 0], pairs[:, 1])
                found.append(_distance(points, pairs[:, 2], pairs[:, 3]) - births)
        return torch.cat(found) if found else points.reshape(-1)[:0]

    def betti(self, scale: float | None) -> list[int]:
        """The Betti numbers of the complex at a distance, of each dimension."""
        if scale is None:
            above = self._distances[np.triu_indices(len(self._distances), 1)]
            scale = float(np.median(above)) if len(above) else 0.0
        bars = [self._tree.persistence_intervals_in_dimension(k) for k in range(self._highest + 1)]
        return [int(sum(birth <= scale < death for birth, death in each)) for each in bars]


def _distance(points: Tensor, first: Any, second: Any) -> Tensor:
    a, b = (points[torch.as_tensor(ends, dtype=torch.long)] for ends in (first, second))
    distance: Tensor = torch.linalg.vector_norm(a - b, dim=-1)
    return distance
