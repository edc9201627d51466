"""Trace a function of tensors, derivatives included, to operations that the SDK can upload.

`make_fx` records what a function computes, its derivatives by autograd too, as operations of ATen,
and leaves sizes open that differ from datum to datum. The SDK sends functions of torch, methods of
tensors and operators of Python: `append_operations` translates one into the other.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

# torch.fx patches `nn.Module` while it traces, which two threads cannot do and undo by turns.
TRACING = threading.Lock()

# A torch.fx.Proxy. It stands for a tensor, and functions that take tensors take it.
Symbol: TypeAlias = Any

_ATEN = torch.ops.aten
_LARGEST_INDEX = 2**63 - 1  # the end of a slice that names none
# Operations of ATen that are functions of torch, with the same arguments.
_SAME = """
    abs neg sign exp expm1 log log1p sqrt rsqrt reciprocal pow square sigmoid tanh relu sin cos erf
    floor ceil round trunc isfinite isinf isnan
    add sub mul div minimum maximum logaddexp where clamp clamp_min clamp_max masked_fill
    eq ne lt le gt ge logical_and logical_or logical_not logical_xor
    sum mean std var logsumexp amax amin max min dot mm bmm cumsum flip
    cat stack select squeeze unsqueeze permute arange full_like zeros_like ones_like
"""
# Options that say where and how a tensor is stored: a server runs the loss on its CPU.
_STORAGE = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})


class SymbolTracer(fx.proxy.GraphAppendingTracer):
    """Appends the operations on symbols to a graph, and refuses tensors that are not inputs."""

    def create_arg(self, a: Any) -> Any:
        """Argument of an operation, as the graph holds it.

        Raises:
            TypeError: it is a tensor, whose values would not be sent.
        """
        if isinstance(a, Tensor):
            raise TypeError("it uses a tensor that is not among its fields")
        return super().create_arg(a)

    def symbol(self, name: str) -> Symbol:
        """A new input of the graph."""
        return fx.Proxy(self.graph.placeholder(name), self)


def append_operations(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Symbol], sample: Sequence[Tensor]
) -> list[Symbol]:
    """Append the operations of a function to the graph of its inputs.

    Args:
        function: takes a tensor for each input.
        inputs: symbols of the graph.
        sample: tensors like the inputs; dimensions of one size must be the same in all data.

    Returns:
        The results of the function.

    Raises:
        ValueError: it needs an operation that an uploaded loss cannot have.
        Exception: whatever the function raises.
    """
    # ATen's sizes are symbols here: an operation on `[T]` holds for data of any length T.
    with TRACING:
        traced = make_fx(function, _decompositions(), tracing_mode="symbolic")(*sample)
    traced.graph.eliminate_dead_code()
    placeholders = traced.graph.find_nodes(op="placeholder")
    symbols: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    for node in traced.graph.find_nodes(op="get_attr"):
        raise ValueError(f"it uses the tensor {node.target}, which is not among its fields")
    for node in traced.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), symbols.__getitem__)
            options = {key: value for key, value in kwargs.items() if key not in _STORAGE}
            symbols[node] = _translate(node.target, inputs[0], args, options)
    results: Any = traced.graph.output_node().args[0]
    return [symbols[node] for node in results]


def _translate(target: Any, tensor: Symbol, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Append an operation of ATen, or of Python on sizes, to the graph of a tensor."""
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return args[0] if target is torch.sym_float else target(*args, **kwargs)
    name = packet.__name__.rstrip("_")  # what is written in place is a result of the trace's own
    if name == "full":
        return _full(tensor, *args)
    if name in _SAME.split():
        return getattr(torch, name)(*args, **kwargs)
    if name not in _TRANSLATIONS:
        raise ValueError(f"{name} is not an operation of uploaded losses")
    return _TRANSLATIONS[name](*args, **kwargs)


def _full(tensor: Symbol, size: Sequence[Any], value: float) -> Symbol:
    zeros = tensor.new_zeros(size)
    return zeros + value if value else zeros


def _slice(x: Symbol, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Symbol:
    stop = None if isinstance(end, int) and end == _LARGEST_INDEX else end
    return x[(*[slice(None)] * dim, slice(start, stop, step))]


def _convert(x: Symbol, dtype: torch.dtype | None = None) -> Symbol:
    return x if dtype is None else x.to(dtype)


# Others: methods, operators of Python, and those that leave their argument as it is.
_TRANSLATIONS: Mapping[str, Callable[..., Any]] = {
    "sym_size": lambda x, dim: x.size(dim),
    "sym_numel": lambda x: x.numel(),
    "slice": _slice,
    "expand": lambda x, size: x.expand(size),
    "view": lambda x, size: x.reshape(size),
    "_to_copy": _convert,
    "scalar_tensor": lambda value, **_: value,
    "copy": lambda _, source: source,
    "alias": lambda x: x,
    "detach": lambda x: x,
    "clone": lambda x: x,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "bitwise_not": operator.invert,
    "_softmax": lambda x, dim, _: torch.softmax(x, dim),
    "_log_softmax": lambda x, dim, _: torch.log_softmax(x, dim),
}


def _slice_backward(
    g: Tensor, size: Sequence[Any], dim: int, start: Any, end: Any, step: int
) -> Tensor:
    """Gradient of `x[start:end]`: zeros before and after it, for x of any length."""
    if step != 1:
        raise ValueError("a slice with a step has no derivative here")
    zeros = g.new_zeros(size)
    before, after = _ATEN.slice(zeros, dim, 0, start), _ATEN.slice(zeros, dim, end, None)
    return torch.cat([before, g, after], dim)


def _select_backward(g: Tensor, size: Sequence[Any], dim: int, index: int) -> Tensor:
    """Gradient of `x[index]`."""
    end = index + 1 or _LARGEST_INDEX
    return _slice_backward(g.unsqueeze(dim), size, dim, index, end, 1)


@cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Rules that replace the operations of ATen that have no translation."""
    same = _SAME.split()
    rules = {
        operation: rule
        for operation, rule in torch.export.default_decompositions().items()  # type: ignore[no-untyped-call]  # torch's has no types
        if operation.overloadpacket.__name__.rstrip("_") not in same
    }
    # In place of torch's own, which write into a tensor.
    rules[_ATEN.slice_backward.default] = _slice_backward
    rules[_ATEN.select_backward.default] = _select_backward
    return rules
