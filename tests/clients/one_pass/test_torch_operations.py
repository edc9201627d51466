"""Each derivative of a traced function against autograd, at random points and at kinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F  # noqa: N812 - its usual name

from steelyard.clients.one_pass.torch_operations import SymbolTracer, append_operations

# Positive, negative, beyond the limits below, equal to each other, and 0.
X = torch.tensor([[0.5, -1.5, 0.25], [2.0, 0.0, -0.75], [1.0, 3.0, -2.0], [0.1, -0.2, 4.0]])
Y = torch.tensor([[0.5, 1.5, -0.25], [1.0, 0.5, -0.75], [2.0, 3.0, 1.0], [0.3, 0.2, 0.4]])
Function = Callable[..., Any]


def both(fn: Function, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the weighted sum of a function, by the operations traced and by autograd.

    They are traced on tensors of another length.
    """

    def gradient_of(x: Tensor, y: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        values = fn(leaf, y)
        return list(torch.autograd.grad((values * values.detach().cos()).sum(), leaf))

    graph = fx.Graph()
    tracer = SymbolTracer(graph)
    symbols = [tracer.symbol(name) for name in ("x", "y")]
    longer = [torch.cat([tensor, tensor[:3]]) for tensor in (x, y)]
    (gradient,) = append_operations(gradient_of, symbols, longer)
    graph.output(gradient.node)
    return fx.GraphModule({}, graph)(x, y), gradient_of(x, y)[0]


EVERYWHERE: dict[str, Function] = {
    "neg": lambda x, _: -x,
    "abs": lambda x, _: x.abs(),
    "exp": lambda x, _: torch.exp(x),
    "expm1": lambda x, _: torch.expm1(x),
    "square": lambda x, _: x.square(),
    "sigmoid": lambda x, _: torch.sigmoid(x),
    "tanh": lambda x, _: x.tanh(),
    "relu": lambda x, _: F.relu(x),
    "log_sigmoid": lambda x, _: F.logsigmoid(x),
    "softplus": lambda x, _: F.softplus(10 * x),
    "sin": lambda x, _: x.sin(),
    "cos": lambda x, _: x.cos(),
    "add": lambda x, y: (x + y) + (1 + x),
    "sub": lambda x, y: (x - y) + (y - x) + (1 - x),
    "mul": lambda x, y: x * y + 2 * x + x * x,
    "div": lambda x, y: x / (y + 3) + y / (x + 9),
    "div by a scalar": lambda x, y: y / x.sum() + x / x.numel(),
    "minimum": torch.minimum,
    "maximum": lambda x, y: torch.maximum(y, x),
    "logaddexp": torch.logaddexp,
    "dot": lambda x, y: torch.dot(x.flatten(), y.flatten()),
    "clamp by tensors": lambda x, y: x.clamp(y, y + 1),
    "pow of two tensors": lambda x, y: (y.abs() + 0.5) ** (x + 1),
    "softplus with an option": lambda x, _: F.softplus(x, beta=2.0),
    "add with an option": lambda x, y: torch.add(x, y, alpha=2),
    "std": lambda x, _: x.std(),
    "a column": lambda x, _: x[:, 0] * x[:, -1],
    "largest value": lambda x, _: x.max(),
    "where": lambda x, y: torch.where(y > 0.4, x, x * y),
    "where, the method": lambda x, y: x.where(y > 0.4, x * y) + y.where(x > 0, x),
    "clamp": lambda x, _: x.clamp(-0.75, 2.0),
    "clamp by name": lambda x, _: torch.clamp(x, max=1.0),
    "clamp_min": lambda x, _: x.clamp_min(0.0),
    "clamp_max": lambda x, _: x.clamp_max(0.5),
    "pow": lambda x, _: x**3 + torch.pow(x, 2),
    "masked_fill": lambda x, y: x.masked_fill(y > 0.4, 7.0),
    "expand_as": lambda x, y: x.sum(-1, keepdim=True).expand_as(y),
    "broadcast": lambda x, y: (x.mean() + x[0]) * y,
    "double": lambda x, _: x.double().exp().float() * x,
    "to": lambda x, y: x.to(torch.float64) * y.double(),
    "clone": lambda x, _: x.clone().contiguous(),
    "sum": lambda x, _: x.sum(),
    "sum over a dimension": lambda x, _: x.square().sum(-1),
    "sum over dimensions": lambda x, _: x.square().sum((0, 1)),
    "sum that keeps it": lambda x, y: x.exp().sum(dim=0, keepdim=True) * y,
    "mean": lambda x, _: x.exp().mean(),
    "mean over a dimension": lambda x, _: x.exp().mean(1),
    "logsumexp": lambda x, _: x.logsumexp(-1),
    "log_softmax": lambda x, _: x.log_softmax(-1),
    "softmax": lambda x, _: torch.softmax(x, 0),
    "cumsum": lambda x, _: x.cumsum(0).square(),
    "flip": lambda x, y: x.flip(0) * y,
    "cat": lambda x, y: torch.cat([x, y, x.exp()], dim=-1),
    "stack": lambda x, y: torch.stack([x, y * x]),
    "getitem": lambda x, _: x[1:] * x[:-1],
    "one row": lambda x, _: x[2] * x[-1],
    "reshape": lambda x, _: x.reshape(-1).square(),
    "flatten": lambda x, _: x.flatten(),
    "unsqueeze": lambda x, y: (x.unsqueeze(-1) * y.unsqueeze(0)[0].unsqueeze(-1)).squeeze(-1),
    "detach": lambda x, _: x.detach() * x,
    "a sign": lambda x, _: torch.sign(x) * x,
}
POSITIVE: dict[str, Function] = {
    "log": lambda x, _: x.log(),
    "log1p": lambda x, _: torch.log1p(x),
    "sqrt": lambda x, _: torch.sqrt(x),
    "rsqrt": lambda x, _: torch.rsqrt(x),
    "reciprocal": lambda x, _: x.reciprocal(),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_derivative_is_that_of_autograd(name: str) -> None:
    found, expected = both(EVERYWHERE[name], X, Y)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", POSITIVE)
def test_a_derivative_for_positive_numbers_is_that_of_autograd(name: str) -> None:
    torch.testing.assert_close(*both(POSITIVE[name], X.abs() + 0.1, Y))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x, _: x[::2], "a slice with a step has no derivative here"),
        (lambda x, _: x.sort().values, "sort is not an operation of uploaded losses"),
        (lambda x, _: x * torch.tensor([1.0, 2.0, 3.0]), "which is not among its fields"),
    ],
)
def test_what_cannot_be_uploaded_is_named(fn: Function, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        both(fn, X, Y)


def test_operations_are_recorded() -> None:
    graph = fx.Graph()
    x = SymbolTracer(graph).symbol("x")
    torch.exp(x).sum()
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "call_method"]


def test_a_tensor_that_is_no_input_is_refused() -> None:
    x = SymbolTracer(fx.Graph()).symbol("x")
    with pytest.raises(TypeError, match="uses a tensor that is not among its fields"):
        x + torch.ones(3)
