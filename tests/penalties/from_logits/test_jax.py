"""The plain formulas over JAX arrays: jitted, differentiated, with a traced step."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from steelyard import schedules
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import _evaluate_jax, compose_logits
from steelyard.penalties.from_logits._components import REVERSE, Z_LOSS, Component
from tests.penalties.backends import Backend
from tests.penalties.from_logits.cases import PLANS, TERMS, arguments, by_autograd, inputs, written

EVERY = list(TERMS)


def test_total_is_differentiable_in_jax() -> None:
    backend = Backend("jax")
    logits, reference, targets = inputs(13, 5, 8)
    z, r, t = arguments(backend, logits, reference, targets)
    scale = torch.full((5,), 0.2, dtype=torch.float64)
    _, gradients = by_autograd(EVERY, logits, reference, targets, scale)

    def total(z: Any) -> Any:
        return compose_logits(z, written(EVERY), reference=r, targets=t).total

    wanted = sum(TERMS[name]["weight"] * gradients[name][0] for name in EVERY)
    for gradient in (jax.grad(total), jax.jit(jax.grad(total))):
        np.testing.assert_allclose(gradient(z), wanted, rtol=1e-9, atol=1e-14)


def test_a_traced_step_in_jax() -> None:
    backend = Backend("jax")
    z, r, _ = arguments(backend, *inputs(45, 4, 9))
    terms: list[Any] = [*PLANS[0], ("kl", {"weight": schedules.cosine(0.5, 0.1, 5)})]

    def everything(z: Any, step: Any) -> Any:
        found = compose_logits(z, terms, reference=r, step=step, track_grad_norms=True)
        return found.total, (found.gradient, found.values, found.grad_norms, found.cosines)

    traced = jax.jit(jax.value_and_grad(everything, has_aux=True))
    for step in (0, 1, 3, 8):
        (total, aux), gradient = jax.value_and_grad(everything, has_aux=True)(z, step)
        (again, others), slope = traced(z, step)
        np.testing.assert_allclose(again, total, rtol=1e-6)
        np.testing.assert_allclose(slope, gradient, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(slope, others[0], rtol=1e-5, atol=1e-8)
        for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(aux), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_target_that_is_no_class_gives_nan() -> None:
    value = from_logits.cross_entropy(jnp.zeros((2, 3)), jnp.array([0, 3]))
    assert math.isnan(float(value))


def test_gradient_and_inner_products_against_autograd() -> None:
    tensors = inputs(56, 4, 6)
    scale = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    names = ["reverse", "z_loss"]
    _, gradients = by_autograd(names, *tensors, scale)
    z, r, t = arguments(Backend("jax"), *tensors)
    components = [Component(REVERSE, 1.0, 100.0), Component(Z_LOSS, 1.0)]
    found = _evaluate_jax.gradient_and_gram(
        z, r, t, jnp.asarray(scale.numpy()), components, [2.0, -3.0]
    )
    exact = 2 * gradients["reverse"][0] - 3 * gradients["z_loss"][0]
    np.testing.assert_allclose(np.asarray(found.logits), exact.numpy(), rtol=1e-9, atol=1e-14)
    each = torch.stack([gradients[name][0].flatten() for name in names])
    np.testing.assert_allclose(np.asarray(found.gram), (each @ each.T).numpy(), rtol=1e-9)
