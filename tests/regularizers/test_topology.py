from __future__ import annotations

import math
from typing import Any

import gudhi
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from steelyard import Pipeline, RegularizerSpec
from steelyard.errors import InputError, TermError
from steelyard.regularizers import TopologicalConsistency

from .checks import assert_gradients, doubles, plain, value_and_gradients

SQUARE = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
CLOUD = np.random.default_rng(6).normal(size=(14, 2))


def plane(datum: Any, logprobs: torch.Tensor) -> torch.Tensor:
    """Pairs of log-probs as points of a plane."""
    return logprobs.reshape(-1, 2)


def given_points(datum: Any, logprobs: Any) -> Any:
    return datum["points"]


def bars(points: Any, dimension: int, max_edge: float = math.inf) -> Any:
    """Bars of GUDHI's own Rips complex, built from the points."""
    rips = gudhi.RipsComplex(points=points, max_edge_length=max_edge)
    tree = rips.create_simplex_tree(max_dimension=dimension + 1)
    tree.compute_persistence(persistence_dim_max=True)
    return tree.persistence_intervals_in_dimension(dimension)


def total(points: Any, dimension: int, power: float = 1.0, max_edge: float = math.inf) -> float:
    found = bars(points, dimension, max_edge)
    lengths = [death - birth for birth, death in found if math.isfinite(death)]
    return float(sum(length**power for length in lengths))


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_persistence_agrees_with_gudhis_rips_complex(dimension: int, power: float) -> None:
    clouds = [np.random.default_rng(seed).normal(size=(16, 3)) for seed in (1, 2)]
    data = [{"points": cloud} for cloud in clouds]
    term = TopologicalConsistency(
        points=given_points, dimensions=dimension, power=power, differentiable=False
    )
    found, metrics = term.compute(data, [torch.zeros(1)] * 2)
    assert found.tolist() == pytest.approx([total(c, dimension, power) for c in clouds], rel=1e-9)
    finite = [[b for b in bars(c, dimension) if math.isfinite(b[1])] for c in clouds]
    assert metrics["bars"] == np.mean([len(each) for each in finite])


@pytest.mark.parametrize("dimensions", [0, 1, (0, 1)])
@pytest.mark.parametrize("power", [1.0, 1.5])
def test_the_gradient_is_exact(dimensions: Any, power: float) -> None:
    rows = [torch.tensor(CLOUD.reshape(-1)), torch.tensor(CLOUD[2:].reshape(-1) * 1.3)]

    def by_gudhi(moved: list[torch.Tensor]) -> float:
        each = (0, 1) if dimensions == (0, 1) else (dimensions,)
        clouds = [row.reshape(-1, 2).numpy() for row in moved]
        return sum(total(cloud, d, power) for cloud in clouds for d in each) / 2

    term = TopologicalConsistency(points=plane, dimensions=dimensions, power=power)
    value, gradients = value_and_gradients(term, [], rows)
    assert value == pytest.approx(by_gudhi(rows), rel=1e-9)
    assert all(bool(row.any()) for row in gradients)
    assert_gradients(term, [], rows, by_gudhi)


def test_a_square_by_hand() -> None:
    term = TopologicalConsistency(
        points=given_points, dimensions=[0, 1], differentiable=False, scale=1.2
    )
    (penalty,), metrics = term.compute([{"points": SQUARE}], [torch.zeros(1)])
    # Three gaps of 1 join four points; one loop lives from 1 to √2.
    assert penalty.item() == pytest.approx(3 + math.sqrt(2) - 1)
    assert metrics == {"betti_0": 1.0, "betti_1": 1.0, "bars": 4.0}


@pytest.mark.parametrize(
    ("scale", "betti"), [(0.5, (4.0, 0.0)), (1.0, (1.0, 1.0)), (2.0, (1.0, 0.0))]
)
def test_betti_numbers_depend_on_the_scale(scale: float, betti: tuple[float, float]) -> None:
    term = TopologicalConsistency(points=given_points, differentiable=False, scale=scale)
    _, metrics = term.compute([{"points": SQUARE}], [torch.zeros(1)])
    assert (metrics["betti_0"], metrics["betti_1"]) == betti


def test_betti_numbers_agree_with_gudhi() -> None:
    circle = np.linspace(0, 2 * math.pi, 20, endpoint=False)
    two = np.concatenate([np.c_[np.cos(circle), np.sin(circle)] + [x, 0] for x in (0, 9)])
    tree = gudhi.RipsComplex(points=two, max_edge_length=1.0).create_simplex_tree(2)
    tree.compute_persistence()
    term = TopologicalConsistency(points=given_points, differentiable=False, scale=1.0)
    _, metrics = term.compute([{"points": two}], [torch.zeros(1)])
    assert [metrics["betti_0"], metrics["betti_1"]] == tree.betti_numbers()[:2] == [2, 2]


def test_long_edges_can_be_left_out() -> None:
    for max_edge in (0.5, 1.1, 2.0):
        for dimension in (0, 1):
            term = TopologicalConsistency(
                points=given_points,
                dimensions=dimension,
                differentiable=False,
                max_edge=max_edge,
                scale=max_edge * 0.99,
            )
            (penalty,), metrics = term.compute([{"points": CLOUD}], [torch.zeros(1)])
            assert penalty.item() == pytest.approx(total(CLOUD, dimension, 1.0, max_edge))
            alive = [b <= max_edge * 0.99 < d for b, d in bars(CLOUD, dimension, max_edge)]
            assert metrics[f"betti_{dimension}"] == sum(alive)


def test_a_loop_that_never_dies_counts_in_betti_numbers_only() -> None:
    # No diagonal, so no triangle: the highest simplices there are make the loop.
    term = TopologicalConsistency(
        points=given_points, differentiable=False, max_edge=1.2, scale=1.1
    )
    (penalty,), metrics = term.compute([{"points": SQUARE}], [torch.zeros(1)])
    assert (penalty, metrics["betti_1"]) == (0.0, 1.0)


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("dimensions", [0, 1])
def test_few_points(count: int, dimensions: int) -> None:
    rows = doubles([-1.0, -2.0, -4.0, -6.0][: 2 * count])
    term = TopologicalConsistency(points=plane, dimensions=dimensions)
    value, (gradient,) = value_and_gradients(term, [], rows)
    assert value == (5.0 if (count, dimensions) == (2, 0) else 0.0)
    assert bool(gradient.isfinite().all())


def test_coinciding_points_have_a_finite_gradient() -> None:
    rows = doubles([-1.0, -1.0] * 4)
    for dimensions in (0, 1):
        term = TopologicalConsistency(points=plane, dimensions=dimensions)
        value, (gradient,) = value_and_gradients(term, [], rows)
        assert value == 0
        assert bool(gradient.isfinite().all())


@settings(max_examples=25, deadline=None)
@given(
    hnp.arrays(np.float64, (8, 2), elements=st.floats(-3, 3, width=32)),
    st.floats(0.5, 2.0),
    st.floats(-math.pi, math.pi),
)
def test_persistence_scales_with_the_points_and_ignores_rotations(
    points: Any, factor: float, angle: float
) -> None:
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    clouds = [points, factor * points, points @ turn + 5.0]
    term = TopologicalConsistency(points=given_points, dimensions=(0, 1), differentiable=False)
    found, _ = term.compute([{"points": cloud} for cloud in clouds], [torch.zeros(1)] * 3)
    own, scaled, turned = found.tolist()
    assert scaled == pytest.approx(factor * own, rel=1e-6, abs=1e-6)
    assert turned == pytest.approx(own, rel=1e-6, abs=1e-6)


def test_a_process_gives_the_same_value_and_gradient() -> None:
    rows = [torch.tensor(CLOUD.reshape(-1))]
    term = TopologicalConsistency(points=plane)
    here = value_and_gradients(term, [], rows)
    spec = RegularizerSpec(term, 1.0)
    assert spec.run_in == "process"
    there = value_and_gradients(term, [], rows, run_in="auto")
    assert there[0] == here[0]
    assert torch.equal(there[1][0], here[1][0])


def test_points_independent_of_the_log_probs_use_the_score_function() -> None:
    data = [{"points": SQUARE}, {"points": CLOUD}]
    term = TopologicalConsistency(points=given_points, dimensions=0, differentiable=False)
    _, gradients = value_and_gradients(term, data, doubles([-1.0], [-2.0, -3.0]), run_in="auto")
    half = (total(np.array(SQUARE), 0) - total(CLOUD, 0)) / 2
    assert gradients[0].tolist() == pytest.approx([half])
    assert gradients[1].tolist() == pytest.approx([-half, -half])


NUMBERS = "must be floating-point numbers of the shape [N, D], got"
NO_PATH = (
    "must be computed from the log-probs through torch, got some with no path to them: build the "
    "regularizer with differentiable=False for a score-function gradient."
)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (torch.zeros(3), f"{NUMBERS} torch.float32 of the shape [3]."),
        ([[1, 2]], f"{NUMBERS} torch.int64 of the shape [1, 2]."),
        ([[math.nan, 0.0]], "must be finite, got NaN or infinity."),
        (SQUARE, NO_PATH),
    ],
)
def test_invalid_points(points: Any, message: str) -> None:
    term = TopologicalConsistency(points=lambda datum, logprobs: points)
    with pytest.raises(InputError) as caught:
        term.compute([], [torch.zeros(1, requires_grad=True)])
    assert str(caught.value) == f"the points of datum 0 {message}"


def test_an_error_in_the_process_names_the_term() -> None:
    spec = RegularizerSpec(TopologicalConsistency(points=given_points), 1.0, "shape")
    with pytest.raises(TermError, match="regularizer 'shape' failed: InputError: the points of da"):
        Pipeline(lambda d, lp: lp[0].sum(), [spec]).compute([{"points": SQUARE}], [torch.zeros(1)])


def test_numerical_differences_agree_with_the_exact_gradient() -> None:
    rows = [torch.tensor(CLOUD.reshape(-1))]
    term = TopologicalConsistency(points=plane)
    _, exact = value_and_gradients(term, [], rows)
    _, found = value_and_gradients(term, [], rows, gradient="numerical")
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)


def test_points_get_the_log_probs_of_the_tokens_that_count() -> None:
    seen: list[int] = []

    def count(datum: Any, logprobs: torch.Tensor) -> torch.Tensor:
        seen.append(len(logprobs))
        return logprobs[:, None]

    term = TopologicalConsistency(points=count, dimensions=0)
    (loss, _) = term.compute([plain(weights=[1, 0, 1])], doubles([-1.0, -9.0, -3.0]))
    assert (seen, loss.item()) == ([2], 2.0)
