"""Reverse-mode differentiation of a graph of torch operations, as operations in the same graph.

An uploaded loss runs on a server that differentiates only the loss itself. To learn the gradient of
each term, the graph computes it: from the last operation of a term back to the log-probs, each
operation passes on the gradient by its rule in `derivatives`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from steelyard.clients.one_pass.derivatives import (
    CONSTANT,
    ELEMENTWISE,
    SHAPED,
    NoDerivativeError,
    Operation,
    operation_name,
)
from steelyard.clients.one_pass.symbols import Symbol

# Of each node, on a sample: its value, for the shapes and types of gradients.
_SAMPLE = "sample"


def evaluate_sample(graph: fx.Graph, inputs: Mapping[str, Tensor]) -> None:
    """Run the nodes of a graph that have no sample yet, on sample inputs by name.

    Raises:
        Exception: whatever an operation raises.
    """
    for node in graph.nodes:
        if _SAMPLE in node.meta:
            continue
        if node.op == "placeholder":
            node.meta[_SAMPLE] = inputs[node.name]
            continue
        args, kwargs = _replaced(node, sample_of)
        if node.op == "call_method":
            node.meta[_SAMPLE] = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            node.meta[_SAMPLE] = node.target(*args, **kwargs)


def sample_of(node: fx.Node) -> Any:
    """Value of a node on the sample inputs."""
    return node.meta[_SAMPLE]


def add_gradient(seeds: Sequence[tuple[Symbol, Symbol]], leaf: Symbol) -> Symbol:
    """Append to a graph the gradient of `Σ (seed · values).sum()` with respect to a leaf.

    Args:
        seeds: values, and the gradient with which each begins, in its shape. All nodes up to these
            must have been evaluated on the sample.
        leaf: what to differentiate with respect to.

    Returns:
        The gradient, in the shape of the leaf.

    Raises:
        NoDerivativeError: an operation has no derivative here, or a value does not depend on the
            leaf.
    """
    nodes = list(leaf.node.graph.nodes)
    reached = _nodes_after(nodes, leaf.node)
    gradients: dict[fx.Node, Symbol] = {}

    def add(node: Any, gradient: Any) -> None:
        if isinstance(node, fx.Node) and node in reached and gradient is not None:
            known = gradients.get(node)
            gradients[node] = gradient if known is None else known + gradient

    for values, seed in seeds:
        if values.node not in reached:
            raise NoDerivativeError("it does not depend on the log-probs")
        add(values.node, seed)
    for node in reversed(nodes):
        if node is leaf.node or node not in gradients:
            continue
        for arg, gradient in _pass_on(node, gradients.pop(node), leaf.tracer):
            add(arg, gradient)
    return gradients[leaf.node]


def _nodes_after(nodes: Sequence[fx.Node], leaf: fx.Node) -> set[fx.Node]:
    """Nodes that can be differentiated with respect to the leaf, and the leaf."""
    reached = {leaf}
    for node in nodes:
        # Nodes without a sample are gradients that were added before: no value depends on them.
        if _SAMPLE not in node.meta or operation_name(node) in CONSTANT:
            continue
        value = node.meta[_SAMPLE]
        # A named tuple, as `sort` gives it, holds tensors.
        differentiable = isinstance(value, tuple) or (
            isinstance(value, Tensor) and value.is_floating_point()
        )
        if differentiable and any(each in reached for each in node.all_input_nodes):
            reached.add(node)
    return reached


def _pass_on(node: fx.Node, gradient: Symbol, tracer: fx.proxy.TracerBase) -> list[tuple[Any, Any]]:
    """Arguments of an operation, each with its gradient."""
    name = operation_name(node)
    rule = ELEMENTWISE.get(name) or SHAPED.get(name)
    if rule is None:
        source = node.args[0]
        if name == "getattr" and isinstance(source, fx.Node):  # a field of a named tuple
            name = operation_name(source)
        raise NoDerivativeError(f"{name} has no derivative here")
    args, kwargs = _replaced(node, lambda each: fx.Proxy(each, tracer))
    first = node.all_input_nodes[0].meta[_SAMPLE]
    is_method = node.op == "call_method"
    operation = Operation(args, kwargs, fx.Proxy(node, tracer), first.dim(), is_method)
    try:
        found = rule(gradient, operation)
    except NoDerivativeError as error:
        raise NoDerivativeError(f"{name} has no derivative here {error}") from None
    pairs: list[tuple[Any, Any]] = []
    for arg, each in zip(node.args, found, strict=False):
        if isinstance(arg, list | tuple):
            pairs += zip(arg, each, strict=True)
        elif each is not None and isinstance(arg, fx.Node):
            fitted = _fit(each, node, arg) if name in ELEMENTWISE else each
            pairs.append((arg, _convert(fitted, node, arg)))
    return pairs


def _replaced(node: fx.Node, by: Callable[[fx.Node], Any]) -> Any:
    """Arguments of an operation, the nodes in them replaced."""
    return fx.map_arg((node.args, node.kwargs), by)


def _fit(gradient: Symbol, node: fx.Node, arg: fx.Node) -> Symbol:
    """Sum a gradient in the shape of a result over the dimensions that were broadcast."""
    result, given = node.meta[_SAMPLE], arg.meta[_SAMPLE]
    if not isinstance(given, Tensor) or result.shape == given.shape:
        return gradient
    added = result.dim() - given.dim()
    if given.dim() == 0:
        return gradient.sum()
    if added:
        gradient = gradient.sum(list(range(added)))
    for dim, (wide, narrow) in enumerate(zip(result.shape[added:], given.shape, strict=True)):
        if wide != narrow:
            gradient = gradient.sum(dim, keepdim=True)
    return gradient


def _convert(gradient: Symbol, node: fx.Node, arg: fx.Node) -> Symbol:
    """Convert a gradient to the type of the argument, if the operation changed it."""
    result, given = node.meta[_SAMPLE], arg.meta[_SAMPLE]
    if not isinstance(given, Tensor) or result.dtype == given.dtype:
        return gradient
    return gradient.double() if given.dtype == torch.float64 else gradient.float()
