"""Weighted sums of penalties, and the norms of their gradients."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
import torch

from steelyard import schedules
from steelyard.errors import GradientError, InputError
from steelyard.penalties import PenaltyPipeline, kl_divergence
from steelyard.penalties._pipeline_terms import build_term, total_of, values_and_norms

from .backends import JAX, NUMPY, TORCH, Backend
from .pipeline_inputs import TEACHER, WARMUP, X, views


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_gradient_norms_of_one_input(autodiff: Backend, dtype: str) -> None:
    pipeline = PenaltyPipeline([("l1", {"weight": 0.5}), ("l2", {"weight": 2.0})])
    _, metrics = pipeline.compute(autodiff.array(X, dtype), track_grad_norms=True)
    # l1: (1, -1), l2: (6, -8); the weighted total: (12.5, -16.5)
    expected = {
        "l1_grad_norm": math.sqrt(2),
        "l2_grad_norm": 10.0,
        "total_grad_norm": math.hypot(12.5, 16.5),
    }
    for name, value in expected.items():
        assert type(metrics[name]) is float
        assert metrics[name] == pytest.approx(value, rel=1e-6)


def test_gradient_norms_are_of_all_inputs_together(autodiff: Backend) -> None:
    pipeline = PenaltyPipeline(
        [
            ("kl", {"weight": 3.0, "inputs": ("student", "teacher")}),
            ("l2", {"weight": -0.5, "inputs": "teacher"}),
        ]
    )
    inputs = views(autodiff)
    _, metrics = pipeline.compute(inputs, track_grad_norms=True)
    of_student, of_teacher = autodiff.gradients(kl_divergence, *inputs.values())
    of_l2 = 2 * TEACHER
    assert metrics["kl_grad_norm"] == pytest.approx(
        math.hypot(np.linalg.norm(of_student), np.linalg.norm(of_teacher))
    )
    assert metrics["l2_grad_norm"] == pytest.approx(np.linalg.norm(of_l2))
    assert metrics["total_grad_norm"] == pytest.approx(
        math.hypot(np.linalg.norm(3 * of_student), np.linalg.norm(3 * of_teacher - 0.5 * of_l2))
    )


def test_one_array_under_two_names_has_a_gradient_for_each(autodiff: Backend) -> None:
    """d(Σab)/d(a, b) = (b, a), of norm √2 · 5; through one array it would be 2a."""
    x = autodiff.array(X)
    if autodiff == TORCH:
        x.requires_grad_()
    product = PenaltyPipeline([(lambda a, b: (a * b).sum(), {"name": "ab", "inputs": ("a", "b")})])
    _, metrics = product.compute({"a": x, "b": x}, track_grad_norms=True)
    assert metrics["ab_grad_norm"] == pytest.approx(5 * math.sqrt(2))
    square = PenaltyPipeline([(lambda a, b: (a * b).sum(), {"name": "aa", "inputs": ("a", "a")})])
    _, metrics = square.compute({"a": x}, track_grad_norms=True)
    assert metrics["aa_grad_norm"] == pytest.approx(10)


def test_each_term_is_evaluated_once_and_differentiated_once() -> None:
    counts = {"forward": 0, "backward": 0}

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            counts["forward"] += 1
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            counts["backward"] += 1
            return gradients[0].expand(2)

    pipeline = PenaltyPipeline([(Counted.apply, {"name": "counted"}), "l2"])
    x = torch.tensor(X, requires_grad=True)
    total, metrics = pipeline.compute(x, track_grad_norms=True)
    assert counts == {"forward": 1, "backward": 1}
    assert metrics["counted_grad_norm"] == pytest.approx(math.sqrt(2))
    total.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([7.0, -7.0]))


def test_jax_evaluates_each_term_once() -> None:
    calls = []

    def watched(x: Any) -> Any:
        calls.append(x)
        return (x**2).sum()

    PenaltyPipeline([watched]).compute(JAX.array(X), track_grad_norms=True)
    assert len(calls) == 1


def test_norms_are_tracked_under_no_grad() -> None:
    for x in (torch.tensor(X), torch.tensor(X, requires_grad=True)):
        with torch.no_grad():
            total, metrics = PenaltyPipeline(["l2"]).compute(x, track_grad_norms=True)
        assert metrics["total_grad_norm"] == 10.0
        assert not total.requires_grad


def test_terms_that_are_not_differentiable_have_no_norm(autodiff: Backend) -> None:
    def outside(x: Any) -> float:
        # NumPy fails on a tensor that requires gradients.
        return float(np.abs(np.asarray(x.cpu() if autodiff.device == "cuda" else x)).max())

    x = autodiff.array(X)
    if autodiff.name == "torch":
        x.requires_grad_()
    pipeline = PenaltyPipeline(["l1"]).add("peak", outside, weight=10.0, differentiable=False)
    total, metrics = pipeline.compute(x, track_grad_norms=True)
    assert metrics["peak"] == 4.0
    assert "peak_grad_norm" not in metrics
    assert metrics["total_grad_norm"] == pytest.approx(math.sqrt(2))
    assert autodiff.numpy(total) == 47.0
    alone = pipeline.remove("l1")
    total, metrics = alone.compute(x, track_grad_norms=True)
    assert metrics == {"peak": 4.0, "peak_weighted": 40.0, "total": 40.0, "total_grad_norm": 0.0}
    assert autodiff.is_mine(total)


def test_inputs_that_are_not_floating_are_passed_unchanged(autodiff: Backend) -> None:
    def picked(x: Any, index: Any, scale: float) -> Any:
        return scale * x[index]

    pipeline = PenaltyPipeline([(picked, {"inputs": ("x", "index", "scale")})])
    inputs = {"x": autodiff.array(X), "index": autodiff.array(1, "int32"), "scale": 2.0}
    total, metrics = pipeline.compute(inputs, track_grad_norms=True)
    assert autodiff.numpy(total) == -8.0
    assert metrics["picked_grad_norm"] == 2.0


def test_a_term_without_a_gradient_is_an_error() -> None:
    for fn in (lambda x: x.detach().sum(), lambda x: 1.0):
        pipeline = PenaltyPipeline([(fn, {"name": "cut"})])
        with pytest.raises(GradientError, match=r"'cut' must depend .* differentiable=False") as no:
            pipeline.compute(TORCH.array(X), track_grad_norms=True)
        assert no.value.term == "cut"


def test_inputs_a_term_does_not_use_have_no_gradient() -> None:
    pipeline = PenaltyPipeline([(lambda a, b: a.sum(), {"name": "a", "inputs": ("a", "b")})])
    inputs = {"a": TORCH.array(X), "b": TORCH.array(X)}
    _, metrics = pipeline.compute(inputs, track_grad_norms=True)
    assert metrics["a_grad_norm"] == pytest.approx(math.sqrt(2))


def test_norms_of_numpy_arrays_are_an_error() -> None:
    with pytest.raises(InputError, match=r"track_grad_norms needs .* got 'x: ndarray' for penalty"):
        PenaltyPipeline(["l1"]).compute(NUMPY.array(X), track_grad_norms=True)


def test_gradient_norms_follow_the_schedule(autodiff: Backend) -> None:
    _, metrics = WARMUP.compute(autodiff.array(X), 2, track_grad_norms=True)
    assert metrics["l2_grad_norm"] == pytest.approx(10.0)
    assert metrics["total_grad_norm"] == pytest.approx(math.hypot(1 + 3, 1 + 4))


def test_a_traced_weight_of_a_python_number() -> None:
    one = PenaltyPipeline([(lambda x: 2.0, {"name": "two", "weight": schedules.warmup(1.0, 4)})])
    assert float(jax.jit(one.compute_total)(JAX.array(X), 1)) == 0.5


def test_values_and_norms_by_hand(autodiff: Backend) -> None:
    """Gradients (1, -1) and (6, -8), weighted (2, -2) and (-3, 4): their sum is (-1, 2)."""
    terms = [build_term("l1", "l1", {}), build_term("l2", "l2", {})]
    terms.append(build_term("constant", "l2", {"differentiable": False}))
    weights = {"l1": 2.0, "l2": -0.5, "constant": 100.0}
    values, norms = values_and_norms(terms, weights, autodiff.array(X))
    assert {name: float(autodiff.numpy(value)) for name, value in values.items()} == {
        "l1": 7.0,
        "l2": 25.0,
        "constant": 25.0,
    }
    assert norms == pytest.approx({"l1": math.sqrt(2), "l2": 10.0, "total": math.sqrt(5)})


def test_no_terms_have_no_norms(autodiff: Backend) -> None:
    assert values_and_norms([], {}, autodiff.array(X)) == ({}, {})


def test_a_weighted_count_is_not_rounded(backend: Backend) -> None:
    """Half of three elements is 1.5; as an integer, of the count's dtype, it would be 1."""
    count = (lambda x: (x < 10).sum(), {"name": "count", "weight": 0.5, "differentiable": False})
    total, metrics = PenaltyPipeline([count]).compute(backend.array([1.0, 2.0, 3.0]))
    assert backend.numpy(total) == metrics["total"] == metrics["count_weighted"] == 1.5
    total = PenaltyPipeline([count, "l1"]).compute_total(backend.array([1.0, 2.0, 3.0], "float32"))
    assert backend.dtype(total) == "float32"
    assert backend.numpy(total) == 7.5


def test_a_weighted_sum_accumulates_in_float32(backend: Backend) -> None:
    """256 + 8 · 0.5 is 260 in float32; each step is lost in bfloat16, whose spacing there is 2."""
    values = {"large": backend.array(256.0, "bfloat16")}
    values |= {str(i): backend.array(0.5, "bfloat16") for i in range(8)}
    total = total_of(dict.fromkeys(values, 1.0), values, backend.array(X))
    assert backend.dtype(total) == "bfloat16"
    assert backend.numpy(total) == 260


def test_a_weighted_sum_of_numbers_is_an_array_like_the_inputs(backend: Backend) -> None:
    weights, values = {"a": 2.0, "b": -1.0}, {"a": 3.0, "b": 0.5}
    for inputs in (backend.array(X, "float32"), {"n": 3, "x": backend.array(X, "float32")}):
        total = total_of(weights, values, inputs)
        assert backend.is_mine(total)
        assert (backend.dtype(total), float(total)) == ("float32", 5.5)
    mixed = total_of(weights, {"a": backend.array(3.0), "b": 0.5}, backend.array(X))
    assert (backend.dtype(mixed), float(mixed)) == ("float64", 5.5)
    assert total_of(weights, values, {}) == 5.5
