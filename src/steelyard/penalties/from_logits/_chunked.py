"""Terms over a projection, by the operators that go over it in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steelyard.penalties.from_logits import _linear, _operators
from steelyard.penalties.from_logits._components import Component
from steelyard.penalties.from_logits._projected import Projected

# Rows for each feature from which the gradient by the weight is small beside the logits.
_MANY = 4


def evaluated(
    problem: Projected, components: Sequence[Component], weights: Sequence[float], reduction: str
) -> Tensor:
    """The weighted sum of the components, reduced; differentiable."""
    if reduction == "none":
        return _rows(problem, components, weights)[0].reshape(problem.rows.shape)
    return composed(problem, components, weights, reduction, tracked=False)[0]


def composed(
    problem: Projected,
    components: Sequence[Component],
    weights: Sequence[float],
    reduction: str,
    tracked: bool,
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    """The differentiable total, the components' values, and their inner products if tracked.

    In between, where other ways have the gradient by the logits, nothing: there are none.
    """
    scale, share = problem.rows.scale(reduction)
    wanted = _wanted(problem)
    late = _is_late(problem, wanted)
    if late:
        total, each = (
            share * (rows if scale is None else rows * scale).sum(-1)
            for rows in _rows(problem, components, weights)
        )
        if not tracked:
            return total, each.detach(), None, None
    wants = [*(asked and not late for asked in wanted), tracked]
    made, values, *_, products = _linear.compose_linear(
        *_flat(problem, scale, components, weights), share, wants
    )
    return total if late else made, values.detach(), None, products.detach() if tracked else None


def _is_late(problem: Projected, wanted: Sequence[bool]) -> bool:
    """Whether the gradients are made in the backward pass, from logits made again.

    float16 cannot hold the gradient of a mean over many rows without a loss scale, which is known
    there alone. And of few rows, one datum's for example, the gradient by the weight would be
    about as large as the logits are, and be kept until then.
    """
    few = problem.rows.logits.shape[0] < _MANY * problem.weight.shape[1]
    return (few and wanted[1]) or (problem.weight.dtype == torch.float16 and any(wanted))


def _rows(
    problem: Projected, components: Sequence[Component], weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """`[rows]` weighted sums and `[components, rows]`; 0 where masked."""
    mask, _ = problem.rows.scale("sum")
    found: tuple[Tensor, Tensor] = _linear.rows(*_flat(problem, mask, components, weights))
    return found


def _wanted(problem: Projected) -> list[bool]:
    """Whether gradients by hidden states, weight and bias will be asked for."""
    given = (problem.rows.logits, problem.weight, problem.bias)
    return [torch.is_grad_enabled() and x is not None and x.requires_grad for x in given]


def _flat(
    problem: Projected,
    scale: Tensor | None,
    components: Sequence[Component],
    weights: Sequence[float],
) -> tuple[object, ...]:
    """The problem as the operators take it."""
    return (
        problem.rows.logits,
        problem.weight,
        problem.bias,
        problem.reference,
        problem.reference_weight,
        problem.reference_bias,
        problem.rows.targets,
        scale,
        *_operators.flat(components),
        list(weights),
        problem.chunk,
    )
