"""A function as an operator of torch: opaque to `torch.compile`, and called as it is elsewhere."""

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
    """What to call: `fn`, differentiable by `backward`.

    A compiler sees an operator of torch. Elsewhere the dispatcher is left out, which takes longer
    than the kernels do.

    Args:
        name: the operator's.
        schema: what it takes and gives.
        fn: what it does. Its first argument is a tensor.
        shapes: the same for tensors without data.
        save: keeps in `ctx` what the backward pass reads, given the inputs and the output.
        backward: from `ctx` and the gradients of the output to those of the inputs.
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
        # Tensors without data, of one device that are several, … are classes of their own.
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
