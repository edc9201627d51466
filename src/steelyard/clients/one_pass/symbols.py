"""Symbols: stand-ins for tensors, on which functions of torch record themselves in a graph."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, fx

# A torch.fx.Proxy. It stands for a tensor, and functions that take tensors take it.
Symbol: TypeAlias = Any


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
