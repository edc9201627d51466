"""Single functions over logits: against the penalties of log-probabilities, on every backend."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from steelyard.errors import GradientError, InputError
from steelyard.penalties import from_logits
from tests.penalties.backends import Backend
from tests.penalties.from_logits.cases import TERMS, by_autograd, expected, inputs

BAD: Any = "x"
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


def test_a_loss_scale_saves_float16() -> None:
    """A thousand rows: the gradient of their mean is below what float16 can hold."""
    many = torch.zeros(2**9, 2, 1024, dtype=torch.float16)
    many[0] = torch.randn(2, 1024)
    many.requires_grad_()
    (2.0**16 * from_logits.z_loss(many)).backward()
    exact = many.detach().double().requires_grad_()
    (2.0**16 * from_logits.z_loss(exact)).backward()
    assert many.grad is not None
    assert exact.grad is not None
    error = (many.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 1e-3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_masked_float16_loss_has_the_value_it_has_without_a_gradient(reduction: Any) -> None:
    logits = inputs(5, 6, 7)[0].half().requires_grad_()
    mask = torch.tensor([True, False, True, True, False, True])
    options: dict[str, Any] = {"mask": mask, "reduction": reduction}
    wanted = from_logits.entropy(logits.detach(), **options)
    torch.testing.assert_close(from_logits.entropy(logits, **options).detach(), wanted)
    composed = from_logits.compose_logits(logits, ["entropy"], **options)
    torch.testing.assert_close(composed.total.detach(), wanted)


def test_nothing_counts(autodiff: Backend) -> None:
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


def test_a_row_without_any_probability(autodiff: Backend) -> None:
    z = autodiff.array([[-np.inf, -np.inf], [0.0, 0.0]])
    assert autodiff.numpy(from_logits.entropy(z, reduction="none"))[0] == 0
    assert autodiff.numpy(from_logits.z_loss(z)) == np.inf
    for fn in (from_logits.entropy, from_logits.z_loss):
        [gradient] = autodiff.gradients(fn, z)
        np.testing.assert_array_equal(gradient[0], 0)


def test_shapes(backend: Backend) -> None:
    one = backend.array([0.0, 0.0, 0.0])
    np.testing.assert_allclose(backend.numpy(from_logits.entropy(one)), math.log(3))
    assert from_logits.entropy(one, reduction="none").shape == ()
    empty = backend.array(np.zeros((0, 3)))
    assert backend.numpy(from_logits.entropy(empty)) == 0
    assert from_logits.entropy(empty, reduction="none").shape == (0,)
    single = backend.array(np.zeros((2, 1)))
    assert backend.numpy(from_logits.entropy(single, normalize=True)) == 0


def test_an_unequal_layout_in_memory() -> None:
    logits, reference, _ = inputs(5, 12, 10, torch.float32)
    turned = logits.t().contiguous().t().requires_grad_()
    skipped = torch.stack([reference, reference], 1)[:, 0].requires_grad_()
    value = from_logits.kl(turned, skipped)
    torch.testing.assert_close(value, from_logits.kl(logits, reference))
    value.backward()
    plain = logits.clone().requires_grad_()
    from_logits.kl(plain, reference).backward()
    torch.testing.assert_close(turned.grad, plain.grad)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("factors", [(0.5, 1.0), (1.0, 0.5)])
def test_backward_twice(reduction: Any, factors: tuple[float, float]) -> None:
    """The gradient that the forward pass made is given away with the last pass alone."""
    logits, reference, _ = inputs(6, 3, 5, torch.float32)
    z, r = logits.requires_grad_(), reference.requires_grad_()
    value = from_logits.kl(z, r, reduction=reduction).sum()
    exact = torch.as_tensor(expected("forward", z, r, torch.zeros(3))).sum()
    wanted = torch.autograd.grad(exact / (3 if reduction == "mean" else 1), (z, r))
    for factor, kept in zip(factors, (True, False), strict=True):
        found = torch.autograd.grad(factor * value, (z, r), retain_graph=kept)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, factor * b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, z)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction: Any) -> None:
    z = torch.randn(3, 5, requires_grad=True)
    value = from_logits.entropy(z, reduction=reduction).sum()
    with pytest.raises(GradientError, match="must be differentiated once, got create_graph=True"):
        torch.autograd.grad(value, z, create_graph=True)


def test_without_a_gradient_none_is_made() -> None:
    z = torch.randn(3, 5, requires_grad=True)
    with torch.no_grad():
        assert not from_logits.entropy(z).requires_grad
    frozen = torch.randn(3, 5)
    assert not from_logits.entropy(frozen).requires_grad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z, t: from_logits.entropy(z, mode=BAD), "mode must be one of 'penalty', 'bonus'"),
        (lambda z, t: from_logits.entropy(z, reduction=BAD), "reduction must be one of"),
        (lambda z, t: from_logits.entropy(z, temperature=0), "temperature must be a finite"),
        (lambda z, t: from_logits.entropy(t), "logits must hold floating-point numbers, got int64"),
        (lambda z, t: from_logits.entropy(z[0, 0]), "logits must have classes on their last axis"),
        (lambda z, t: from_logits.kl(z, z[:1]), "logits and reference must have the same shape"),
        (lambda z, t: from_logits.kl(z, z, direction=BAD), "direction must be one of 'forward'"),
        (lambda z, t: from_logits.kl(z, z, max_log_ratio=-1), "max_log_ratio must be None or"),
        (lambda z, t: from_logits.cross_entropy(z, z[:, 0]), "targets must hold integers"),
        (lambda z, t: from_logits.cross_entropy(z, t[:1]), "targets must have the shape of logits"),
        (lambda z, t: from_logits.js(z, z, mask=t), "mask must hold booleans, got int64"),
    ],
)
def test_bad_inputs_are_named(backend: Backend, make: Any, message: str) -> None:
    z, t = backend.array(np.zeros((2, 3)), "float32"), backend.array([0, 1], "int64")
    with pytest.raises(InputError) as caught:
        make(z, t)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_a_target_that_is_no_class(kind: Any) -> None:
    with pytest.raises(InputError, match=r"targets must be in \[0, 2\] .* got 3"):
        from_logits.cross_entropy(kind(np.zeros((2, 3))), kind(np.array([0, 3])))


def test_a_target_that_is_no_class_in_jax() -> None:
    value = from_logits.cross_entropy(jnp.zeros((2, 3)), jnp.array([0, 3]))
    assert math.isnan(float(value))
