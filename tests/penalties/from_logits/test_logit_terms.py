"""Single functions over logits: against the penalties of log-probabilities, on every backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from steelyard.penalties import from_logits
from tests.penalties.backends import Backend
from tests.penalties.from_logits.cases import TERMS, by_autograd, expected, inputs

FUNCTIONS = {"forward": "kl", "reverse": "kl", "symmetric": "kl"}


def call(name: str, z: Any, r: Any, t: Any, **options: Any) -> Any:
    fn = getattr(from_logits, FUNCTIONS.get(name, name))
    own = {key: value for key, value in TERMS[name].items() if key != "weight"}
    second = {"cross_entropy": [t], "entropy": [], "z_loss": []}.get(name, [r])
    return fn(z, *second, **own, **options)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize(("temperature", "hard"), [(1.0, False), (0.5, True)])
def test_values_and_gradients(backend: Backend, name: str, temperature: float, hard: bool) -> None:
    logits, reference, targets = inputs(1, 7, 37, hard=hard)
    kept = np.array([True, True, True, True, True, True, False])
    arrays = [backend.array(x.numpy()) for x in (logits, reference)]
    t = backend.array(targets.numpy(), "int64")
    mask = backend.mask(kept)
    scale = torch.as_tensor(kept / kept.sum())
    values, gradients = by_autograd(
        [name], logits, reference, targets, scale, temperature=temperature
    )
    value = call(name, arrays[0], arrays[1], t, mask=mask, temperature=temperature)
    assert backend.is_mine(value)
    assert value.shape == ()
    np.testing.assert_allclose(backend.numpy(value), values[name], rtol=1e-12)
    rows = call(name, arrays[0], arrays[1], t, mask=mask, temperature=temperature, reduction="none")
    each = expected(name, logits, reference, targets, temperature=temperature)
    np.testing.assert_allclose(backend.numpy(rows)[:-1], each[:-1], rtol=1e-12, atol=1e-14)
    assert backend.numpy(rows)[-1] == 0
    total = call(name, arrays[0], arrays[1], t, mask=mask, temperature=temperature, reduction="sum")
    np.testing.assert_allclose(backend.numpy(total), values[name] * kept.sum(), rtol=1e-12)
    if backend.name == "numpy":
        return

    def loss(z: Any, r: Any) -> Any:
        # The reference takes part either way, so that it has a gradient to ask for.
        nothing = (r * 0)[:1, 6].sum()
        return 3 * call(name, z, r, t, mask=mask, temperature=temperature) + nothing

    for found, wanted in zip(backend.gradients(loss, *arrays), gradients[name], strict=True):
        np.testing.assert_allclose(found, 3 * wanted, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", TERMS)
def test_a_gradient_for_each_row(autodiff: Backend, name: str) -> None:
    logits, reference, targets = inputs(2, 4, 9)
    shape = (2, 2, 9)
    z, r = (autodiff.array(x.numpy().reshape(shape)) for x in (logits, reference))
    t = autodiff.array(targets.numpy().reshape(2, 2), "int64")
    factors = autodiff.array([[1.0, -2.0], [0.0, 5.0]])
    scale = torch.tensor([1.0, -2.0, 0.0, 5.0], dtype=torch.float64)
    _, gradients = by_autograd([name], logits, reference, targets, scale)

    def loss(z: Any, r: Any) -> Any:
        return (call(name, z, r, t, reduction="none") * factors).sum() + (r * 0).sum()

    for found, wanted in zip(autodiff.gradients(loss, z, r), gradients[name], strict=True):
        np.testing.assert_allclose(found.reshape(4, 9), wanted, rtol=1e-9, atol=1e-14)


def test_target_logprobs(autodiff: Backend) -> None:
    logits, _, targets = inputs(3, 6, 11)
    z, t = autodiff.array(logits.numpy()), autodiff.array(targets.numpy(), "int64")
    mask = autodiff.mask([True, True, False, True, True, True])
    rows = autodiff.numpy(from_logits.target_logprobs(z, t, mask=mask, temperature=2.0))
    wanted = (logits / 2).log_softmax(-1).gather(-1, targets[:, None])[:, 0].numpy()
    np.testing.assert_allclose(np.delete(rows, 2), np.delete(wanted, 2), rtol=1e-12)
    assert rows[2] == 0
    [gradient] = autodiff.gradients(lambda z: from_logits.target_logprobs(z, t).sum(), z)
    hit = np.eye(11)[targets.numpy()]
    np.testing.assert_allclose(gradient, hit - logits.softmax(-1).numpy(), rtol=1e-9, atol=1e-14)


def test_z_loss_by_hand(backend: Backend) -> None:
    z = backend.array(np.log([[1.0, 3.0], [2.0, 2.0]]), "float32")
    assert backend.dtype(from_logits.z_loss(z)) == "float32"
    np.testing.assert_allclose(backend.numpy(from_logits.z_loss(z)), math.log(4) ** 2, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_logits_give_float32(backend: Backend, dtype: str) -> None:
    logits, _, _ = inputs(4, 3, 5000)
    z = backend.array(logits.numpy(), dtype)
    value = from_logits.entropy(z)
    assert backend.dtype(value) == "float32"
    exact = from_logits.entropy(backend.numpy(z))
    np.testing.assert_allclose(backend.numpy(value), exact, rtol=1e-5)


def test_masked_rows_and_an_empty_mask(autodiff: Backend) -> None:
    """NaN in masked rows stays there; a mask without a row gives 0."""
    bad = np.full((2, 4), np.nan)
    bad[0] = 0.5
    z, t = autodiff.array(bad), autodiff.array([0, -100], "int64")
    mask = autodiff.mask([True, False])
    np.testing.assert_allclose(
        autodiff.numpy(from_logits.cross_entropy(z, t, mask=mask)), math.log(4), rtol=1e-12
    )
    [gradient] = autodiff.gradients(lambda z: from_logits.cross_entropy(z, t, mask=mask), z)
    wanted = np.array([[-0.75, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(gradient, wanted, rtol=1e-12)
    [gradient] = autodiff.gradients(
        lambda z: from_logits.cross_entropy(z, t, mask=mask, reduction="none").sum(), z
    )
    np.testing.assert_allclose(gradient, wanted, rtol=1e-12)
    none = autodiff.mask([False])
    assert autodiff.numpy(from_logits.entropy(z, mask=none)) == 0
    [gradient] = autodiff.gradients(lambda z: from_logits.entropy(z, mask=none), z)
    np.testing.assert_array_equal(gradient, 0)


def test_a_row_of_minus_infinity(autodiff: Backend) -> None:
    z = autodiff.array([[-np.inf, -np.inf], [0.0, 0.0]])
    assert autodiff.numpy(from_logits.entropy(z, reduction="none"))[0] == 0
    assert autodiff.numpy(from_logits.z_loss(z)) == np.inf
    for fn in (from_logits.entropy, from_logits.z_loss):
        [gradient] = autodiff.gradients(fn, z)
        np.testing.assert_array_equal(gradient[0], 0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_target_at_minus_infinity_has_the_gradient_of_the_limit(
    backend: Backend, temperature: float
) -> None:
    """(p - onehot) / T, as torch's and optax's own; the loss itself is infinite."""
    logits = np.array([[0.3, -math.inf, 1.2, -0.5], [0.3, 0.1, 1.2, -0.5], [-math.inf] * 4])
    targets = backend.array(np.array([1, 1, 1]), "int64")

    def loss(z: Any) -> Any:
        return from_logits.cross_entropy(z, targets, temperature=temperature, reduction="none")

    values = backend.numpy(loss(backend.array(logits)))
    assert np.isinf(values).tolist() == [True, False, True]
    if backend.name == "numpy":
        return
    leaf = torch.tensor(logits[:2], requires_grad=True)
    functional.cross_entropy(leaf / temperature, torch.tensor([1, 1]), reduction="sum").backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert leaf.grad is not None
    wanted = [*leaf.grad.tolist(), [0.0, -1 / temperature, 0.0, 0.0]]
    (found,) = backend.gradients(lambda z: loss(z).sum(), backend.array(logits))
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-15)
