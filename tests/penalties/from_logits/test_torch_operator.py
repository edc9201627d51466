"""Registration of torch operators: called directly, dispatched, compiled, differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from steelyard.penalties.from_logits._torch_operators import operator

CALLS: list[type] = []


def cube(x: Tensor, factor: float) -> Tensor:
    CALLS.append(type(x))
    return factor * x**3


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return 3 * ctx.factor * x**2 * upstream, None


cubed = operator(
    "cube_for_tests",
    "(Tensor x, float factor) -> Tensor",
    cube,
    lambda x, factor: torch.empty_like(x),
    save,
    backward,
)
plain = operator("double_for_tests", "(Tensor x) -> Tensor", lambda x: 2 * x, torch.empty_like)


def test_the_direct_call_is_differentiable() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    found = cubed(x, 0.5)
    torch.testing.assert_close(found.detach(), torch.tensor([0.5, -4.0]))
    [gradient] = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([1.5, 6.0]))


def test_the_dispatched_operator_gives_the_same() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    found = torch.ops.steelyard.cube_for_tests(x, 0.5)
    [gradient] = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([1.5, 6.0]))


def test_fake_tensors_use_the_shapes_alone() -> None:
    CALLS.clear()
    with FakeTensorMode():
        assert cubed(torch.zeros(3, 2), 1.0).shape == (3, 2)
    assert CALLS == []


def test_a_compiled_function_has_no_graph_break() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    compiled = torch.compile(lambda x: cubed(x, 2.0).sum(), fullgraph=True, backend="aot_eager")
    [gradient] = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(gradient, torch.tensor([6.0, 54.0]))


def test_an_operator_without_a_backward_pass() -> None:
    torch.testing.assert_close(plain(torch.ones(2)), torch.full((2,), 2.0))
