"""Gradient norms of all terms: by hand, beside separate gradients, and their cost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from steelyard.integrations.jax import loss_with_penalties
from steelyard.integrations.jax.loss import at_least_float32, gradient_norms
from steelyard.penalties import PenaltyPipeline
from tests.integrations.jax.classifier import PIPELINE, Tree, base, batch, initial, norm


def test_gradient_norms_by_hand() -> None:
    params = {"a": jnp.array([3.0, 4.0]), "b": jnp.array(2.0)}

    def values(p: Tree) -> dict[str, Any]:
        return {"square": jnp.sum(p["a"] ** 2) / 2, "product": p["a"][0] * p["b"]}

    found = gradient_norms(values, params, {"square": 1.0, "product": -2.0})
    # d square = (3, 4 | 0), d product = (2, 0 | 3); square − 2 product = (−1, 4 | −6)
    expected = {"square": 5.0, "product": np.sqrt(13.0), "total": np.sqrt(53.0)}
    assert list(found) == list(expected)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)


def test_other_leaves_are_constants() -> None:
    params = {"a": jnp.array([3.0, 4.0]), "activation": jnp.square, "count": jnp.array(2)}

    def values(p: Tree) -> dict[str, Any]:
        return {"square": p["count"] * jnp.sum(p["activation"](p["a"]))}

    found = gradient_norms(values, params, {"square": 0.5})
    assert {name: float(value) for name, value in found.items()} == {"square": 20.0, "total": 10.0}


def test_narrow_values_are_reduced_in_float32() -> None:
    # The squares of 300 overflow float16.
    params = jnp.array([1.0, 1.0], jnp.float16)
    found = gradient_norms(lambda p: {"steep": jnp.sum(300 * p)}, params, {"steep": 1.0})
    assert found["steep"].dtype == jnp.float32
    assert float(found["steep"]) == pytest.approx(300 * np.sqrt(2), rel=1e-6)
    assert at_least_float32(jnp.bfloat16(1.0)).dtype == jnp.float32
    assert at_least_float32(np.float64(1.0)).dtype == jnp.float64


def test_norms_are_those_of_separate_gradients() -> None:
    params, (x, y) = initial(), batch(1)
    loss = loss_with_penalties(base, PIPELINE, track_grad_norms=True)
    (_, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, x, y)
    plain = loss_with_penalties(base, PIPELINE)
    each = jax.jit(jax.jacrev(lambda p: plain(p, x, y)[1]))(params)
    for name in ("base", "l2", "entropy", "l1"):
        np.testing.assert_allclose(metrics[f"{name}_grad_norm"], norm(each[name]), rtol=1e-10)
    np.testing.assert_allclose(metrics["total_grad_norm"], norm(gradient), rtol=1e-10)


def test_a_penalty_that_is_not_differentiable_is_a_constant_without_a_norm() -> None:
    pipeline = PenaltyPipeline([("l2", {"differentiable": False}), ("l1", {"weight": 2.0})])
    loss = loss_with_penalties(jnp.sum, pipeline, track_grad_norms=True)
    (total, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array([3.0, 1.0]))
    assert float(total) == 4.0 + 10.0 + 8.0
    assert gradient.tolist() == [3.0, 3.0]
    assert "l2_grad_norm" not in metrics
    np.testing.assert_allclose(metrics["total_grad_norm"], np.sqrt(18.0), rtol=1e-6)


def test_norms_have_no_gradient() -> None:
    loss = loss_with_penalties(jnp.sum, PenaltyPipeline(["l2"]), track_grad_norms=True)
    slope = jax.jit(jax.grad(lambda p: loss(p)[1]["l2_grad_norm"]))(np.array([3.0, 4.0]))
    assert slope.tolist() == [0.0, 0.0]


def test_the_base_is_evaluated_once_for_all_norms() -> None:
    """However many terms, the base is traced twice: for the total, and for the norms."""
    calls: list[int] = []

    def counted(params: Tree, x: Any, y: Any) -> Any:
        calls.append(1)
        return base(params, x, y)

    loss = loss_with_penalties(counted, PIPELINE, track_grad_norms=True)
    jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(initial(), *batch(0))
    assert len(calls) == 2
