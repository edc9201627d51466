"""Registration of functions as torch operators, opaque to `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library.Library  # it has no types
_LIBRARY = _library("steelyard", "DEF")


def operator(
    name: str,
    schema: str,
    fn: Callable[..., Any],
    shapes: Callable[..., Any],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register `fn` as a torch operator and return the function to call, differentiable.

    Under a compiler and for tensor subclasses the call goes through the dispatcher. Elsewhere it
    calls `fn` directly: the dispatcher takes longer than the kernels do.

    Args:
        name: Name of the operator.
        schema: Its arguments and results.
        fn: Its implementation. The first argument is a tensor.
        shapes: The same for tensors without data.
        save: Stores in `ctx` what the backward pass reads, given the inputs and the output.
        backward: Maps `ctx` and the gradients of the output to those of the inputs.
    """
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"steelyard::{name}", shapes, lib=_LIBRARY)
    direct = fn
    if save is not None and backward is not None:
        torch.library.register_autograd(
            f"steelyard::{name}", backward, setup_context=save, lib=_LIBRARY
        )
        direct = _differentiable(fn, save, backward)
    dispatched = getattr(torch.ops.steelyard, name).default

    def call(first: Tensor, *others: Any) -> Any:
        # Fake tensors, distributed tensors and the like are subclasses.
        plain = type(first) is Tensor or type(first) is torch.nn.Parameter
        if torch.compiler.is_compiling() or not plain:
            return dispatched(first, *others)
        return direct(first, *others)

    return call


def _differentiable(
    fn: Callable[..., Any], save: Callable[..., None], backward_: Callable[..., Any]
) -> Callable[..., Any]:
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = fn(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward_(ctx, *gradients)

    apply: Callable[..., Any] = Differentiable.apply
    return apply
