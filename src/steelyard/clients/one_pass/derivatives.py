"""Derivatives of torch's operations, as operations of torch: the rules of `reverse_mode`.

A rule takes the gradient g of a scalar with respect to the result y of an operation, and gives the
gradient with respect to each argument, as further operations in the same graph. At kinks they are
those of autograd: abs has 0 at 0, clamp passes g at its limits, minimum shares it between equals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from steelyard.clients.one_pass.symbols import Symbol


@dataclass(frozen=True)
class Operation:
    """One operation of a graph.

    Attributes:
        args: its arguments; tensors in them are proxies.
        kwargs: the named ones.
        result: its result y.
        rank: the number of dimensions of its first argument.
        is_method: whether it was called as a method of that argument.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Symbol
    rank: int
    is_method: bool = False

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that may be given by its position or by its name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def dimensions(self, position: int = 1) -> list[int]:
        """Dimensions that the operation reduces, from 0; all of them if it names none."""
        dim = self.argument(position, "dim")
        if dim is None or dim == ():
            return list(range(self.rank))
        dims = [dim] if isinstance(dim, int) else list(dim)
        return sorted(each % self.rank for each in dims)


Gradient: TypeAlias = Any  # a symbol, a list of them for an argument that is a list, or None
Rule: TypeAlias = Callable[[Symbol, Operation], Sequence[Gradient]]


class NoDerivativeError(Exception):
    """An operation has no rule, or is used in a way that its rule does not know."""


def _unary(derivative: Callable[[Symbol, Symbol, Symbol], Symbol]) -> Rule:
    """Rule of an elementwise function of one tensor, from `(g, x, y)`; it takes no options."""

    def rule(g: Symbol, op: Operation) -> Sequence[Gradient]:
        # torch.nn.functional.relu passes its default on.
        if len(op.args) > 1 or op.kwargs not in ({}, {"inplace": False}):
            raise NoDerivativeError("with these options")
        return [derivative(g, op.args[0], op.result)]

    return rule


def _binary(derivative: Callable[[Symbol, Any, Any, Symbol], Sequence[Any]]) -> Rule:
    """Rule of an elementwise function of two tensors, from `(g, a, b, y)`; it takes no options."""

    def rule(g: Symbol, op: Operation) -> Sequence[Gradient]:
        if len(op.args) != 2 or op.kwargs:  # noqa: PLR2004 - a and b
            raise NoDerivativeError("with these options")
        a, b = op.args
        return derivative(g, a, b, op.result)

    return rule


def _where(g: Symbol, op: Operation) -> Sequence[Gradient]:
    # torch.where(condition, a, b), and a.where(condition, b)
    condition = op.args[1 if op.is_method else 0]
    of_a, of_b = torch.where(condition, g, 0.0), torch.where(condition, 0.0, g)
    return [of_a, None, of_b] if op.is_method else [None, of_a, of_b]


def _clamp(g: Symbol, op: Operation) -> Sequence[Gradient]:
    low, high = op.argument(1, "min"), op.argument(2, "max")
    return [_within(g, op.args[0], low, high)]


def _within(g: Symbol, x: Symbol, low: Any, high: Any) -> Symbol:
    """`g` where x is within the limits, which must be numbers, else 0."""
    if any(isinstance(limit, fx.Proxy) for limit in (low, high)):
        raise NoDerivativeError("with a tensor as a limit")
    if low is not None:
        g = torch.where(x >= low, g, 0.0)
    if high is not None:
        g = torch.where(x <= high, g, 0.0)
    return g


def _power(g: Symbol, op: Operation) -> Sequence[Gradient]:
    base, exponent = op.args[0], op.argument(1, "exponent")
    if isinstance(exponent, fx.Proxy):
        raise NoDerivativeError("with a tensor as the exponent")
    return [g * exponent * base ** (exponent - 1), None]


def _smaller_or_larger(g: Symbol, a: Symbol, b: Symbol, y: Symbol) -> Sequence[Symbol]:
    """Rule of minimum and maximum: to the one that is the result, half to each of two equals."""
    half = torch.where(a == b, 0.5, 1.0)
    zero = 0.0
    return [torch.where(a == y, g * half, zero), torch.where(b == y, g * half, zero)]


def _expand(g: Symbol, op: Operation, dims: Sequence[int], *, kept: bool) -> Symbol:
    """`g` of a reduction over `dims`, repeated to the shape of what was reduced."""
    if not kept:
        for dim in dims:
            g = g.unsqueeze(dim)
    return g.expand_as(op.args[0])


def _sum(g: Symbol, op: Operation) -> Sequence[Gradient]:
    return [_expand(g, op, op.dimensions(), kept=op.argument(2, "keepdim", default=False))]


def _mean(g: Symbol, op: Operation) -> Sequence[Gradient]:
    x, count = op.args[0], 1
    for dim in op.dimensions():
        count = count * x.size(dim)
    return [_sum(g / count, op)[0]]


def _logsumexp(g: Symbol, op: Operation) -> Sequence[Gradient]:
    dims, kept = op.dimensions(), op.argument(2, "keepdim", default=False)
    g, y = (_expand(each, op, dims, kept=kept) for each in (g, op.result))
    return [g * torch.exp(op.args[0] - y)]


def _log_softmax(g: Symbol, op: Operation) -> Sequence[Gradient]:
    (dim,) = op.dimensions()
    return [g - op.result.exp() * g.sum(dim, keepdim=True)]


def _softmax(g: Symbol, op: Operation) -> Sequence[Gradient]:
    (dim,) = op.dimensions()
    return [op.result * (g - (g * op.result).sum(dim, keepdim=True))]


def _cumsum(g: Symbol, op: Operation) -> Sequence[Gradient]:
    (dim,) = op.dimensions()
    return [g.flip(dim).cumsum(dim).flip(dim)]


def _flip(g: Symbol, op: Operation) -> Sequence[Gradient]:
    return [g.flip(*op.args[1:], **op.kwargs)]


def _reshape(g: Symbol, op: Operation) -> Sequence[Gradient]:
    return [g.reshape(op.args[0].shape)]


def _cat(g: Symbol, op: Operation) -> Sequence[Gradient]:
    parts, dim = op.args[0], op.argument(1, "dim", default=0)
    start: Any = 0
    found = []
    for part in parts:
        size = part.size(dim)
        found.append(g.narrow(dim, start, size))
        start = size if isinstance(start, int) else start + size
    return [found]


def _stack(g: Symbol, op: Operation) -> Sequence[Gradient]:
    dim = op.argument(1, "dim", default=0)
    return [[g.select(dim, index) for index in range(len(op.args[0]))]]


def _getitem(g: Symbol, op: Operation) -> Sequence[Gradient]:
    """Rule of `x[i]` and `x[a:b]`: zeros before and after the part that was taken."""
    x, index = op.args
    if isinstance(index, slice) and index.step in (None, 1):
        start, stop = index.start, index.stop
    elif isinstance(index, int):
        start, stop, g = index, (index + 1 or None), g.unsqueeze(0)
    else:
        raise NoDerivativeError("with such an index")
    if any(isinstance(limit, fx.Proxy) for limit in (start, stop)):
        raise NoDerivativeError("with such an index")
    before = [] if start is None else [torch.zeros_like(x[:start])]
    after = [] if stop is None else [torch.zeros_like(x[stop:])]
    return [torch.cat([*before, g, *after]), None]


def _cast(g: Symbol, _: Operation) -> Sequence[Gradient]:
    return [g]  # `reverse_mode` converts it to the type of the argument


_UNARY: dict[str, Callable[[Symbol, Symbol, Symbol], Symbol]] = {
    "neg": lambda g, _, __: -g,
    "abs": lambda g, x, _: g * torch.sign(x),
    "exp": lambda g, _, y: g * y,
    "expm1": lambda g, _, y: g * (y + 1),
    "log": lambda g, x, _: g / x,
    "log1p": lambda g, x, _: g / (x + 1),
    "sqrt": lambda g, _, y: g / (2 * y),
    "rsqrt": lambda g, _, y: -0.5 * g * y * y * y,
    "square": lambda g, x, _: 2 * g * x,
    "reciprocal": lambda g, _, y: -g * y * y,
    "sigmoid": lambda g, _, y: g * y * (1 - y),
    "tanh": lambda g, _, y: g * (1 - y * y),
    "relu": lambda g, x, _: torch.where(x > 0, g, 0.0),
    "log_sigmoid": lambda g, x, _: g * torch.sigmoid(-x),
    # For x > 20 torch gives x itself, whose derivative 1 is the sigmoid to 2e-9.
    "softplus": lambda g, x, _: g * torch.sigmoid(x),
    "sin": lambda g, x, _: g * torch.cos(x),
    "cos": lambda g, x, _: -g * torch.sin(x),
}
_BINARY: dict[str, Callable[[Symbol, Any, Any, Symbol], Sequence[Any]]] = {
    "add": lambda g, _, __, ___: [g, g],
    "sub": lambda g, _, __, ___: [g, -g],
    "mul": lambda g, a, b, _: [g * b, g * a],
    "div": lambda g, _, b, y: [g / b, -g * y / b],
    "minimum": _smaller_or_larger,
    "maximum": _smaller_or_larger,
    "logaddexp": lambda g, a, b, y: [g * torch.exp(a - y), g * torch.exp(b - y)],
    "dot": lambda g, a, b, _: [g * b, g * a],
}
# The result has the shape of the arguments, broadcast; the rule need not undo the broadcast.
ELEMENTWISE: Mapping[str, Rule] = {
    **{name: _unary(derivative) for name, derivative in _UNARY.items()},
    **{name: _binary(derivative) for name, derivative in _BINARY.items() if name != "dot"},
    "where": _where,
    "clamp": _clamp,
    "clamp_min": lambda g, op: [_within(g, op.args[0], op.argument(1, "min"), None)],
    "clamp_max": lambda g, op: [_within(g, op.args[0], None, op.argument(1, "max"))],
    "pow": _power,
    "masked_fill": lambda g, op: [torch.where(op.args[1], 0.0, g), None, None],
    "expand_as": _cast,
    "expand": _cast,
    "broadcast_to": _cast,
    **dict.fromkeys(("double", "float", "to", "type_as", "clone", "contiguous"), _cast),
}
# The rule gives gradients in the shapes of the arguments.
SHAPED: Mapping[str, Rule] = {
    "dot": _binary(_BINARY["dot"]),
    "sum": _sum,
    "mean": _mean,
    "logsumexp": _logsumexp,
    "log_softmax": _log_softmax,
    "softmax": _softmax,
    "cumsum": _cumsum,
    "flip": _flip,
    "cat": _cat,
    "stack": _stack,
    "getitem": _getitem,
    **dict.fromkeys(("reshape", "view", "flatten", "unsqueeze", "squeeze"), _reshape),
}
# Constant wherever they have a derivative, or meant to be constants.
CONSTANT = frozenset(
    {"detach", "sign", "floor", "ceil", "round", "trunc", "zeros_like", "ones_like", "full_like"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "isfinite", "isnan", "isinf"}
    | {"logical_and", "logical_or", "logical_not", "and_", "or_", "invert"}
)
_ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "truediv": "div",
    "true_divide": "div",
    "negative": "neg",
    "clip": "clamp",
    "concat": "cat",
    "logsigmoid": "log_sigmoid",
}


def operation_name(node: fx.Node) -> str:
    """Name of an operation, the same for a function of torch, its method and its operator."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return _ALIASES.get(name, name)
