"""Torch operators over logits: backward passes, float16, `torch.compile`."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steelyard.errors import GradientError, InputError
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import _torch_operators, compose_linear, compose_logits
from steelyard.penalties.from_logits._components import Component
from steelyard.penalties.from_logits.cluster import launch
from tests.penalties.from_logits.cases import TERMS, expected, inputs, written

EVERY = list(TERMS)


def test_arrays_on_different_devices() -> None:
    """A kernel gets addresses alone, and would read memory that is not there."""
    logits, reference, targets = inputs(19, 4, 7, torch.float32)
    rule = "must be on the device of logits, cpu, got meta"
    with pytest.raises(InputError, match=f"targets {rule}"):
        compose_logits(logits, ["cross_entropy"], targets=targets.to("meta"))
    with pytest.raises(InputError, match=f"reference {rule}"):
        compose_logits(logits, ["kl"], reference=reference.to("meta"))
    with pytest.raises(InputError, match=f"targets {rule}"):
        compose_linear(logits, torch.ones(3, 7), ["cross_entropy"], targets=targets.to("meta"))


def test_compiled_backward_twice() -> None:
    logits, reference, _ = inputs(20, 4, 7, torch.float32)
    z = logits.requires_grad_()

    def step(z: torch.Tensor) -> Any:
        found = compose_logits(z, ["kl", "z_loss"], reference=reference, track_grad_norms=True)
        return found.total, found.grad_norms["total"]

    total, norm = step(z)
    [wanted] = torch.autograd.grad(total, z)
    compiled, again = torch.compile(step, fullgraph=True, backend="aot_eager")(z)
    torch.testing.assert_close(again, norm)
    torch.testing.assert_close(norm, wanted.norm().double())
    for factor, kept in ((0.5, True), (1.0, False)):
        [found] = torch.autograd.grad(factor * compiled, z, retain_graph=kept)
        torch.testing.assert_close(found, factor * wanted)


def test_compiled_without_a_graph_break() -> None:
    logits, reference, targets = inputs(17, 6, 10, torch.float32)
    weight = torch.randn(10, 10)

    def step(z: torch.Tensor, r: torch.Tensor) -> Any:
        total = compose_logits(z, written(EVERY), reference=r, targets=targets).total
        linear = compose_linear(z, weight, ["entropy"], targets=targets).total
        rows = compose_logits(z.half(), ["z_loss"], reference=r).total
        return 2 * total + linear + rows

    plain = [logits.clone().requires_grad_(), reference.clone().requires_grad_()]
    value = step(plain[0], plain[1])
    value.backward()
    compiled = [logits.clone().requires_grad_(), reference.clone().requires_grad_()]
    again = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    again.backward()
    torch.testing.assert_close(again, value)
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_float16_gradients_wait_for_the_loss_scale() -> None:
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
def test_a_masked_float16_loss_equals_the_one_without_gradient(reduction: Any) -> None:
    logits = inputs(5, 6, 7)[0].half().requires_grad_()
    mask = torch.tensor([True, False, True, True, False, True])
    options: dict[str, Any] = {"mask": mask, "reduction": reduction}
    wanted = from_logits.entropy(logits.detach(), **options)
    torch.testing.assert_close(from_logits.entropy(logits, **options).detach(), wanted)
    composed = from_logits.compose_logits(logits, ["entropy"], **options)
    torch.testing.assert_close(composed.total.detach(), wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("factors", [(0.5, 1.0), (1.0, 0.5)])
def test_backward_twice(reduction: Any, factors: tuple[float, float]) -> None:
    """The gradient of the forward pass is scaled in place only if the graph is not retained."""
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


def test_no_gradient_is_computed_if_none_is_required() -> None:
    z = torch.randn(3, 5, requires_grad=True)
    with torch.no_grad():
        assert not from_logits.entropy(z).requires_grad
    frozen = torch.randn(3, 5)
    assert not from_logits.entropy(frozen).requires_grad


def test_components_as_flat_lists() -> None:
    components = [Component(0, 1.0), Component(1, 1.0, 5.0)]
    assert _torch_operators.flat(components) == ([0, 1], [1.0, 1.0], [math.inf, 5.0])


def test_gradients_that_are_required() -> None:
    trained, frozen = torch.zeros(1, requires_grad=True), torch.zeros(1)
    assert _torch_operators.wanted(trained, frozen, None) == [True, False, False]
    with torch.no_grad():
        assert _torch_operators.wanted(trained) == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by a kernel, and without one
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_scaling_in_place(factor: float, dtype: torch.dtype) -> None:
    x = torch.tensor([2.0, -4.0], dtype=dtype)
    _torch_operators.scale_(x, torch.tensor(factor))
    torch.testing.assert_close(x, factor * torch.tensor([2.0, -4.0], dtype=dtype))


def test_on_a_gpu_one_kernel_does_the_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on a GPU is played; `make test-gpu` has real ones."""
    calls: list[tuple[Any, ...]] = []

    def multiply(*args: Any) -> bool:
        calls.append(args)
        return True

    monkeypatch.setattr(launch, "ENABLED", True)
    monkeypatch.setattr(_torch_operators, "multiply", multiply)
    x, factor = SimpleNamespace(is_cuda=True), torch.tensor(0.5)
    _torch_operators._scale_by_kernel(x, factor)  # type: ignore[arg-type]  # played
    assert calls == [(x, factor)]
