"""Torch operators over a projection: logits exist for one chunk of rows at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from steelyard.penalties.from_logits._components import Component
from steelyard.penalties.from_logits._formulas import SweepResult, Wants
from steelyard.penalties.from_logits._torch_operators import (
    operator,
    refuse_second_order,
    run_sweep,
    scale_gradients,
)
from steelyard.penalties.from_logits.cluster.launch import ClusterResult

# Components as flat lists: a torch operator takes no tuples.
_PROBLEM = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? reference, Tensor? reference_weight, "
    "Tensor? reference_bias, Tensor? targets, Tensor? scale, "
    "int[] kinds, float[] temperatures, float[] limits, float[] weights, int chunk"
)
_TENSORS = 8
T = TypeVar("T")


class _Problem(NamedTuple):
    """Arguments that every operator in this file takes first."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    reference: Tensor | None
    reference_weight: Tensor | None
    reference_bias: Tensor | None
    targets: Tensor | None
    scale: Tensor | None
    kinds: list[int]
    temperatures: list[float]
    limits: list[float]
    weights: list[float]
    chunk: int

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def chunks(self) -> list[slice]:
        starts = range(0, len(self.hidden), self.chunk)
        return [slice(start, start + self.chunk) for start in starts]

    def rows(self, at: slice) -> Tensor:
        """Hidden states of a chunk; 0 where the row has scale 0, since 0 · NaN is NaN."""
        rows = self.hidden[at]
        return rows if self.scale is None else rows.masked_fill((self.scale[at] == 0)[:, None], 0)

    def sweep(
        self, at: slice, rows: Tensor, share: float, wants: Wants
    ) -> SweepResult | ClusterResult:
        """Compute the logits of a chunk and sweep over them; the gradient may overwrite them."""
        components = zip(self.kinds, self.temperatures, self.limits, strict=True)
        reference = None if self.reference is None else self.reference[at]
        if reference is not None and self.reference_weight is not None:
            reference = _logits(reference, self.reference_weight, self.reference_bias)
        return run_sweep(
            _logits(rows, self.weight, self.bias),
            reference,
            None if self.targets is None else self.targets[at],
            None if self.scale is None else self.scale[at],
            [Component(*component) for component in components],
            [share * weight for weight in self.weights],
            wants,
            in_place=True,
        )


class _Gradients:
    """Gradients by hidden states, weight and bias, accumulated over chunks; empty if not wanted.

    With `logits = hidden @ weight.T + bias` and G the gradient by the logits, they are
    `G @ weight`, `G.T @ hidden` and the sum of G over rows.
    """

    def __init__(self, problem: _Problem, wants: list[bool]) -> None:
        hidden, weight = problem.hidden, problem.weight
        self.hidden = torch.empty_like(hidden) if wants[0] else hidden.new_empty(0)
        # Sums over all rows: a 16-bit float would stop growing.
        self.weight, self.bias = (
            torch.zeros(shape if wanted else (0,), dtype=problem.wide, device=hidden.device)
            for shape, wanted in ((weight.shape, wants[1]), (weight.shape[:1], wants[2]))
        )
        self._wants, self._projection, self._dtype = wants, weight, hidden.dtype

    def add(self, at: slice, rows: Tensor, gradients: Tensor) -> None:
        by_hidden, by_weight, by_bias = self._wants
        if by_hidden:
            torch.mm(gradients, self._projection, out=self.hidden[at])
        if by_weight:
            _add_product(self.weight, gradients, rows)
        if by_bias:
            self.bias += gradients.sum(0, dtype=self.bias.dtype)

    @property
    def in_input_dtype(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight.to(self._dtype), self.bias.to(self._dtype)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())


def _add_product(total: Tensor, gradients: Tensor, rows: Tensor) -> None:
    """`total += gradientsᵀ · rows`, accumulated in the total's precision."""
    if total.dtype == gradients.dtype:
        total.addmm_(gradients.t(), rows)
    elif gradients.is_cuda:  # pragma: no cover  # by `make test-gpu`
        torch.ops.aten.addmm.dtype_out(total, gradients.t(), rows, total.dtype, out=total)
    else:
        total.addmm_(gradients.t().to(total.dtype), rows.to(total.dtype))


def _without_autocast(fn: Callable[..., T]) -> Callable[..., T]:
    """Compute in the dtype of the projection.

    Autocast would round float32 hidden states and weights to 16 bits, and so the logits, whose
    gradient could then not be multiplied with the weight.
    """

    @functools.wraps(fn)
    def run(*given: Any) -> T:
        with torch.autocast(given[0].device.type, enabled=False):
            return fn(*given)

    return run


@_without_autocast
def _compose_linear(*given: Any) -> tuple[Tensor, ...]:
    """Total, values of the components, gradients, and inner products in logit space."""
    problem, (share, wants) = _Problem(*given[:-2]), given[-2:]
    *by, gram = wants
    gradients = _Gradients(problem, by)
    count, device = len(problem.kinds), problem.hidden.device
    sums = torch.zeros(count + 1, dtype=torch.float64, device=device)
    products = torch.zeros(count, count, dtype=torch.float64, device=device)
    for at in problem.chunks():
        rows = problem.rows(at)
        sweep = problem.sweep(at, rows, share, Wants(logits=any(by), gram=gram))
        values = sweep.values.sum(1, dtype=torch.float64)
        sums[:count] += share * values[:count]
        sums[count] += values[count:].sum()
        if sweep.gram is not None:
            products += share**2 * sweep.gram
        if sweep.logits is not None:
            gradients.add(at, rows, sweep.logits)
        del sweep  # frees the chunk before the next one is computed
    return (
        sums[count].to(problem.wide, copy=True),
        sums[:count].to(problem.wide, copy=True),
        *gradients.in_input_dtype,
        products if gram else products.new_empty(0),
    )


def _compose_shapes(*given: Any) -> tuple[Tensor, ...]:
    problem, wants = _Problem(*given[:-2]), given[-1]
    hidden, count = problem.hidden, len(problem.kinds)
    return (
        hidden.new_empty((), dtype=problem.wide),
        hidden.new_empty(count, dtype=problem.wide),
        *_gradient_shapes(problem, wants[:3]),
        hidden.new_empty((count, count) if wants[3] else 0, dtype=torch.float64),
    )


def _gradient_shapes(problem: _Problem, wants: list[bool]) -> tuple[Tensor, ...]:
    hidden, weight = problem.hidden, problem.weight
    shapes = (weight.shape, weight.shape[:1])
    return (
        torch.empty_like(hidden) if wants[0] else hidden.new_empty(0),
        *(hidden.new_empty(s if w else (0,)) for s, w in zip(shapes, wants[1:], strict=True)),
    )


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del inputs
    ctx.save_for_backward(*output[2:5])
    ctx.set_materialize_grads(False)


compose_linear = operator(
    "compose_linear",
    f"({_PROBLEM}, float share, bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _compose_linear,
    _compose_shapes,
    _save_gradients,
    scale_gradients,
)


@_without_autocast
def _rows(*given: Any) -> tuple[Tensor, Tensor]:
    """Weighted sum by row, and the components by row, each times the row's scale."""
    problem = _Problem(*given)
    count = len(problem.kinds)
    values = problem.hidden.new_empty((count + 1, len(problem.hidden)), dtype=problem.wide)
    for at in problem.chunks():
        values_of_chunk = problem.sweep(at, problem.rows(at), 1.0, Wants()).values
        values[:count, at], values[count, at] = (
            values_of_chunk[:count],
            values_of_chunk[count:].sum(0),
        )
    return values[count].clone(), values[:count].clone()


def _rows_shapes(*given: Any) -> tuple[Tensor, Tensor]:
    problem = _Problem(*given)
    shape = (len(problem.kinds), len(problem.hidden))
    return (
        problem.hidden.new_empty(shape[1], dtype=problem.wide),
        problem.hidden.new_empty(shape, dtype=problem.wide),
    )


def _save_problem(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.rest = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _rows_backward(ctx: Any, by_rows: Tensor, *others: None) -> tuple[Any, ...]:
    """Recompute each chunk's logits: each row's factor is known only in the backward pass."""
    del others
    refuse_second_order()
    *tensors, scale = [None if tensor is None else tensor.detach() for tensor in ctx.saved_tensors]
    factor = by_rows.detach().contiguous()  # see `_torch_operators._sweep_back`
    factor = factor if scale is None else factor * (scale != 0)
    wants = list(ctx.needs_input_grad[:3])
    computed = rows_back(*tensors, factor, *ctx.rest, wants)
    gradients = [
        gradient if wanted else None for gradient, wanted in zip(computed, wants, strict=True)
    ]
    return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


rows = operator(
    "linear_rows",
    f"({_PROBLEM}) -> (Tensor, Tensor)",
    _rows,
    _rows_shapes,
    _save_problem,
    _rows_backward,
)


@_without_autocast
def _rows_back(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, wants = _Problem(*given[:-1]), given[-1]
    gradients = _Gradients(problem, wants)
    for at in problem.chunks():
        rows = problem.rows(at)
        sweep = problem.sweep(at, rows, 1.0, Wants(logits=True))
        gradients.add(at, rows, sweep.logits)  # type: ignore[arg-type]  # wanted, so not None
        del sweep  # frees the chunk before the next one is computed
    return gradients.in_input_dtype


rows_back = operator(
    "linear_rows_back",
    f"({_PROBLEM}, bool[] wants) -> (Tensor, Tensor, Tensor)",
    _rows_back,
    lambda *given: _gradient_shapes(_Problem(*given[:-1]), given[-1]),
)
