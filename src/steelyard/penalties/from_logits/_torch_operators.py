"""Torch operators over logits: values and gradients, with their registration."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from array_api_compat import torch as xp
from torch import Tensor

from steelyard._torch_internals import graph_is_retained
from steelyard.errors import GradientError, InputError
from steelyard.penalties.from_logits._components import Component
from steelyard.penalties.from_logits._formulas import SweepResult, Wants, sweep
from steelyard.penalties.from_logits._logit_inputs import check_targets
from steelyard.penalties.from_logits.cluster import launch
from steelyard.penalties.from_logits.cluster.launch import ClusterResult, multiply

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


# Components as flat lists: a torch operator takes no tuples.
_PROBLEM = (
    "Tensor logits, Tensor? reference, Tensor? targets, Tensor? scale, "
    "int[] kinds, float[] temperatures, float[] limits, float[] weights"
)


def _compose(
    logits: Tensor,
    reference: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
    kinds: list[int],
    temperatures: list[float],
    limits: list[float],
    weights: list[float],
    share: float,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Total, reduced values of the components, gradients, and inner products."""
    counts = [share * weight for weight in weights]
    problem = (logits, reference, targets, scale, kinds, temperatures, limits, counts)
    sweep = _sweep_flat(Wants(*wants), *problem)
    total, values, products = _over_rows(sweep, len(kinds), share)
    return (
        total,
        values,
        _or_empty(sweep.logits, logits),
        _or_empty(sweep.reference, logits),
        _or_empty(products, logits),
    )


def _sweep_flat(
    wants: Wants,
    logits: Tensor,
    reference: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
    kinds: list[int],
    temperatures: list[float],
    limits: list[float],
    weights: list[float],
) -> SweepResult | ClusterResult:
    """Sweep a problem as the operators have it, with its components in flat lists."""
    components = [
        Component(*component) for component in zip(kinds, temperatures, limits, strict=True)
    ]
    return run_sweep(logits, reference, targets, scale, components, weights, wants)


def _over_rows(
    sweep: SweepResult | ClusterResult, count: int, share: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Total, values of the components and inner products, over all rows."""
    if isinstance(sweep, ClusterResult):  # pragma: no cover  # by `make test-gpu`
        reduced = sweep.reduced(share)
        if reduced is not None:
            return reduced
    sums = sweep.values.sum(1, dtype=torch.float64)
    wide = sweep.values.dtype
    values = torch.mul(sums[:count], share, out=sums.new_empty(count, dtype=wide))
    products = None if sweep.gram is None else share**2 * sweep.gram
    return sums[count:].sum(dtype=wide), values, products


def _compose_shapes(
    logits: Tensor,
    reference: Tensor | None,
    targets: Tensor | None,  # noqa: ARG001
    scale: Tensor | None,  # noqa: ARG001
    kinds: list[int],
    temperatures: list[float],  # noqa: ARG001
    limits: list[float],  # noqa: ARG001
    weights: list[float],  # noqa: ARG001
    share: float,  # noqa: ARG001
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide, count = _wide(logits), len(kinds)
    return (
        logits.new_empty((), dtype=wide),
        logits.new_empty(count, dtype=wide),
        torch.empty_like(logits) if wants[0] else logits.new_empty(0),
        torch.empty_like(reference) if wants[1] else logits.new_empty(0),  # type: ignore[arg-type]
        logits.new_empty((count, count) if wants[2] else 0, dtype=torch.float64),
    )


def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del inputs
    ctx.save_for_backward(output[2], output[3])
    ctx.set_materialize_grads(False)


def scale_gradients(ctx: Any, by_total: Tensor, *others: None) -> tuple[Any, ...]:
    """Return the gradients that the forward pass computed, times the upstream factor.

    If the graph is not retained, they are scaled in place: the factor is usually 1, and then
    nothing is read or written. If it is, a copy is returned, so that another pass finds them as
    they were.
    """
    del others
    refuse_second_order()
    gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    for i, gradient in enumerate(ctx.saved_tensors):
        if gradient.numel() and ctx.needs_input_grad[i]:
            gradients[i] = gradient.detach().clone() if graph_is_retained() else gradient.detach()
            scale_(gradients[i], by_total.detach())
    return tuple(gradients)


compose = operator(
    "compose_logits",
    f"({_PROBLEM}, float share, bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compose,
    _compose_shapes,
    save_gradients,
    scale_gradients,
)


def _scale(x: Tensor, factor: Tensor) -> None:
    if _has_kernels(x) and x.dtype != torch.float64:
        _scale_by_kernel(x, factor)
    elif x.is_cuda or factor.item() != 1:  # on a GPU `item` would synchronize
        x.mul_(factor)


def _scale_by_kernel(x: Tensor, factor: Tensor) -> None:
    from steelyard.penalties.from_logits import _triton_sweep  # noqa: PLC0415  # needs Triton

    if not (launch.ENABLED and x.is_cuda and multiply(x, factor)):
        _triton_sweep.scale(x, factor)


scale_ = operator("scale_", "(Tensor(a!) x, Tensor factor) -> ()", _scale, lambda *_: None)


def _rows(logits: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    """Weighted sum by row, and the components by row, each times the row's scale."""
    sweep, count = _sweep_flat(Wants(), logits, *problem), len(problem[3])
    return sweep.values[count:].sum(0), sweep.values[:count].clone()


def _rows_shapes(logits: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    count, wide = len(logits), _wide(logits)
    return (
        logits.new_empty(count, dtype=wide),
        logits.new_empty((len(problem[3]), count), dtype=wide),
    )


def _save_problem(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    ctx.save_for_backward(*inputs[:4])
    ctx.components = inputs[4:]
    ctx.set_materialize_grads(False)


def _sweep_back(ctx: Any, by_rows: Tensor, *others: None) -> tuple[Any, ...]:
    """Sweep again for the gradients: each row's factor is known only in the backward pass."""
    del others
    refuse_second_order()
    logits, reference, targets, scale = ctx.saved_tensors
    # The gradient of a sum is an expanded scalar with stride 0, which the kernels cannot read.
    factor = by_rows.contiguous() if scale is None else by_rows * (scale != 0)
    wants = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
    both = rows_back(
        logits.detach(),
        None if reference is None else reference.detach(),
        targets,
        factor.detach(),
        *ctx.components,
        wants,
    )
    gradients = [gradient if wanted else None for gradient, wanted in zip(both, wants, strict=True)]
    return (*gradients, *[None] * 6)


rows = operator(
    "logit_rows",
    f"({_PROBLEM}) -> (Tensor, Tensor)",
    _rows,
    _rows_shapes,
    _save_problem,
    _sweep_back,
)


def _rows_back(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *problem, wants = arguments
    sweep = _sweep_flat(Wants(*wants), logits, *problem)
    return _or_empty(sweep.logits, logits), _or_empty(sweep.reference, logits)


def _rows_back_shapes(
    logits: Tensor, reference: Tensor | None, *problem: Any
) -> tuple[Tensor, Tensor]:
    wants = problem[-1]
    return (
        torch.empty_like(logits) if wants[0] else logits.new_empty(0),
        torch.empty_like(reference) if wants[1] else logits.new_empty(0),  # type: ignore[arg-type]
    )


rows_back = operator(
    "logit_rows_back",
    f"({_PROBLEM}, bool[] wants) -> (Tensor, Tensor)",
    _rows_back,
    _rows_back_shapes,
)


def run_sweep(
    logits: Tensor,
    reference: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
    components: Sequence[Component],
    weights: Sequence[float],
    wants: Wants,
    *,
    in_place: bool = False,
) -> SweepResult | ClusterResult:
    """Sweep by the kernels if they can; `in_place` lets the gradient overwrite the logits.

    Raises:
        InputError: The arrays are on different devices, or a target is out of range.
    """
    _check_devices(logits, reference=reference, targets=targets, mask=scale)
    if _has_kernels(logits):
        from steelyard.penalties.from_logits import _triton_sweep  # noqa: PLC0415  # needs Triton

        if _triton_sweep.fits(logits, reference, components):
            problem = (logits, reference, targets, scale, components, weights, wants)
            return _run_kernel(problem, into=logits if in_place else None)
    elif targets is not None:
        check_targets(targets, scale, logits.shape[-1])
    return sweep(xp, logits, reference, targets, scale, components, weights, wants)


def _check_devices(logits: Tensor, **others: Tensor | None) -> None:
    """Check that a kernel can read all arrays: it gets their addresses alone."""
    for name, x in others.items():
        if x is not None and x.device != logits.device:
            raise InputError(
                f"{name} must be on the device of logits, {logits.device}, got {x.device}; move it "
                "first."
            )


def _run_kernel(problem: Any, into: Tensor | None) -> SweepResult | ClusterResult:
    """Sweep by the cluster kernel if it is enabled and can, else by the Triton kernel."""
    from steelyard.penalties.from_logits import _triton_sweep  # noqa: PLC0415  # needs Triton

    logits, reference, _, _, components, *_ = problem
    enabled = launch.ENABLED and launch.fits(logits, reference, components)
    if enabled:  # pragma: no cover  # by `make test-gpu`
        result = launch.sweep(*problem, into=into)
        if result is not None:
            return result
    return _triton_sweep.sweep(*problem, into=into)


def flat(components: Sequence[Component]) -> tuple[list[int], list[float], list[float]]:
    """Components as flat lists, as the operators take them."""
    return (
        [component.kind for component in components],
        [component.temperature for component in components],
        [component.limit for component in components],
    )


def wanted(*inputs: Tensor | None) -> list[bool]:
    """Return for each input whether its gradient is required."""
    enabled = torch.is_grad_enabled()
    return [enabled and x is not None and x.requires_grad for x in inputs]


def defers_gradient(logits: Tensor, reference: Tensor | None) -> bool:
    """Return whether the gradients are computed in the backward pass.

    float16 underflows in the gradient of a mean over many rows; the loss scale that prevents it
    is known only in the backward pass.
    """
    return any(
        x is not None and x.dtype == torch.float16 and required
        for x, required in zip((logits, reference), wanted(logits, reference), strict=True)
    )


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and _HAS_TRITON


def refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise GradientError(
            "a penalty from logits must be differentiated once, got create_graph=True; for second "
            "derivatives use the penalties of log-probabilities, on logits.log_softmax(-1)."
        )


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x
