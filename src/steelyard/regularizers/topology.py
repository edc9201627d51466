"""Topology: total persistence of a point cloud per datum."""

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
from steelyard.gradients.datum_fields import as_tensor
from steelyard.gradients.layout import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import DatumRow, counted_rows
from steelyard.spec.error_messages import title

MAX_DIMENSION = 2


@dataclass(frozen=True, kw_only=True)
class TopologicalConsistency:
    """Total persistence of the Vietoris-Rips filtration of each datum's points.

    `Σ (d - b)^power` over the persistence bars with birth b and finite death d in the chosen
    homology dimensions, for each datum; the value is the mean over data. Dimension 0 measures the
    distances between clusters of points (b = 0), dimension 1 the size of loops, dimension 2 of
    voids.

    With `differentiable=True`, where the points are computed from the log-probs, **the gradient
    is exact** wherever no two distances are equal: each b and d is the distance of two points,
    and which two does not change under small moves. With `differentiable=False` the term returns
    one penalty per datum and **the gradient is the score-function estimate**: unbiased for the
    expected penalty if the data were sampled from the model being trained; on fixed data it makes
    data with large persistence less likely.

    It runs in a process unless its spec says otherwise: the points function, the data and the
    log-probs are sent there, and the gradient is sent back.

    Reads from each datum: the fields that `points` reads; `weights` (optional), where 0 leaves a
    token out.

    Args:
        points: a function `(datum, logprobs)`, or its `"package.module:attr"`, that returns the
            `[N, D]` points of a datum; `logprobs` are those of the tokens that count.
        dimensions: homology dimensions to sum over, among 0, 1 and 2; a number or several.
        power: the power of each bar's length, at least 1.
        max_edge: longer distances form no edge; bars that have not died by then do not count.
        scale: the distance at which the Betti numbers in the metrics are counted; None: the
            median distance.
        differentiable: whether the points depend on the log-probs through torch.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: GUDHI is not installed.

    Example:
        >>> square = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
        >>> shape = TopologicalConsistency(points=lambda datum, lp: lp.sum() * square)
        >>> loss, metrics = shape.compute([None], [torch.tensor([-2.0], requires_grad=True)])
        >>> print(f"{loss:.4f}")  # one loop with birth 2 and death 2√2
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
        chosen = self.dimensions
        several = isinstance(chosen, Sequence) and not isinstance(chosen, str)
        dimensions = tuple(chosen) if several else (chosen,)  # type: ignore[arg-type]  # several
        known = bool(dimensions) and all(
            isinstance(d, int) and not isinstance(d, bool) and 0 <= d <= MAX_DIMENSION
            for d in dimensions
        )
        _options.require(known, "dimensions", "among 0, 1 and 2", chosen, name)
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

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Any, dict[str, float]] | Any:
        """Compute the penalty (one per datum if not differentiable); Betti numbers, and `bars`.

        The metrics `betti_k` and `bars`, the number of finite bars, are means over data.
        """
        rows = counted_rows(data, logprobs, classes=True)
        if not rows:
            return None
        totals, betti, bars = [], [], []
        for row in rows:
            points = self._check_points(self.points(row.datum, row.kept), row)
            diagram = _PersistenceDiagram(points, self.dimensions, self.max_edge)  # type: ignore[arg-type]  # a tuple
            lengths = diagram.lengths(points)
            totals.append(lengths.pow(self.power).sum())
            betti.append(diagram.betti(self.scale))
            bars.append(len(lengths))
        means = np.mean(betti, axis=0)
        metrics = {f"betti_{k}": float(number) for k, number in enumerate(means)}
        metrics["bars"] = float(np.mean(bars))
        penalties = torch.stack(totals)
        return penalties.mean() if self.differentiable else penalties, metrics

    def _check_points(self, returned: Any, row: DatumRow) -> Tensor:
        points, index = as_tensor(returned), row.index
        if points.dim() != 2 or not points.is_floating_point():  # noqa: PLR2004 - [N, D]
            raise InputError(
                f"the points of datum {index} must be floating-point numbers of the shape [N, D], "
                f"got {points.dtype} of the shape {list(points.shape)}.",
                datum=index,
            )
        if not bool(points.isfinite().all()):
            raise InputError(
                f"the points of datum {index} must be finite, got NaN or infinity.", datum=index
            )
        if self.differentiable and row.logprobs.requires_grad and not points.requires_grad:
            raise InputError(
                f"the points of datum {index} must be computed from the log-probs through torch, "
                f"got some with no path to them: build the regularizer with differentiable=False "
                f"for a score-function gradient.",
                datum=index,
            )
        return points if self.differentiable else points.detach()


class _PersistenceDiagram:
    """Persistent homology of a point cloud, with the pair of points behind each birth and death.

    GUDHI computes on detached float64 distances. Its *persistence generators* name, for each bar,
    the vertices of the edges whose lengths are birth and death; `lengths` computes these distances
    again from the differentiable points, which gives the (sub)gradient of the persistence.
    """

    def __init__(self, points: Tensor, dimensions: Sequence[int], max_edge: float) -> None:
        import gudhi  # noqa: PLC0415 - an extra

        cloud = points.detach().cpu().double()
        # Not by matrix products: ‖a‖² + ‖b‖² - 2a·b cancels for points that are close together.
        distances = torch.cdist(cloud, cloud, compute_mode="donot_use_mm_for_euclid_dist")
        self._distances = distances.numpy()
        self._dimensions = dimensions
        self._highest = max(dimensions)
        tree = gudhi.SimplexTree.create_from_array(self._distances, max_filtration=max_edge)
        # Bars of dimension k die by simplices of dimension k + 1.
        tree.expansion(self._highest + 1)
        # By default GUDHI omits bars of the highest dimension of the complex, since they cannot die
        # in it. If that dimension is one of ours (few points, short edges), they must count.
        tree.compute_persistence(persistence_dim_max=tree.dimension() <= self._highest)
        self._tree = tree

    def lengths(self, points: Tensor) -> Tensor:
        """Lengths of all finite bars of the chosen dimensions, `[B]`, differentiable.

        Dimension 0: rows (born vertex, death edge of two vertices), with birth 0. Dimension k > 0:
        rows (birth edge, death edge), two vertices each.
        """
        low, high, _, _ = self._tree.flag_persistence_generators()
        lengths = []
        for dimension in self._dimensions:
            if dimension == 0 and len(low):
                lengths.append(_distance(points, low[:, 1], low[:, 2]))
            elif 0 < dimension <= len(high) and len(high[dimension - 1]):
                edges = high[dimension - 1]
                births = _distance(points, edges[:, 0], edges[:, 1])
                lengths.append(_distance(points, edges[:, 2], edges[:, 3]) - births)
        return torch.cat(lengths) if lengths else points.reshape(-1)[:0]

    def betti(self, scale: float | None) -> list[int]:
        """Betti number of each dimension at a scale: the number of bars with b <= scale < d."""
        if scale is None:
            above = self._distances[np.triu_indices(len(self._distances), 1)]
            scale = float(np.median(above)) if len(above) else 0.0
        by_dimension = [
            self._tree.persistence_intervals_in_dimension(k) for k in range(self._highest + 1)
        ]
        return [int(sum(birth <= scale < death for birth, death in bars)) for bars in by_dimension]


def _distance(points: Tensor, first: Any, second: Any) -> Tensor:
    """`‖points[first] - points[second]‖₂`, row by row; gradient 0 where two points coincide."""
    a, b = (points[torch.as_tensor(ends, dtype=torch.long)] for ends in (first, second))
    distance: Tensor = torch.linalg.vector_norm(a - b, dim=-1)
    return distance
