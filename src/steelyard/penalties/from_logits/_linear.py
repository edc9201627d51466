"""The operator behind `compose_linear`: logits exist for one chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steelyard.penalties.from_logits._components import Component
from steelyard.penalties.from_logits._operators import (
    operator,
    save_gradients,
    scale_gradients,
    swept,
)
from steelyard.penalties.from_logits._sweep import Wants

_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? reference, Tensor? reference_hidden, "
    "Tensor? reference_weight, Tensor? targets, Tensor? scale, int[] kinds, "
    "float[] temperatures, float[] limits, float[] weights, float share, bool[] wants, int chunk) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _compose_linear(
    hidden: Tensor,
    weight: Tensor,
    reference: Tensor | None,
    reference_hidden: Tensor | None,
    reference_weight: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
    kinds: list[int],
    temperatures: list[float],
    limits: list[float],
    weights: list[float],
    share: float,
    wants: list[bool],
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The total, the components' values, the gradients and the inner products in logit space."""
    components = [Component(*each) for each in zip(kinds, temperatures, limits, strict=True)]
    counts = [share * each for each in weights]
    by_hidden, by_weight, gram = wants
    made = Wants(logits=by_hidden or by_weight, gram=gram)
    count, wide = len(kinds), _wide(hidden)
    sums = torch.zeros(count + 1, dtype=torch.float64, device=hidden.device)
    products = torch.zeros(count, count, dtype=torch.float64, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if by_hidden else hidden.new_empty(0)
    of_weight = torch.zeros_like(weight, dtype=wide) if by_weight else hidden.new_empty(0)
    for start in range(0, len(hidden), chunk):
        at = slice(start, start + chunk)
        rows = hidden[at]
        logits = rows @ weight.t()
        beside = None if reference is None else reference[at]
        if reference_hidden is not None and reference_weight is not None:
            beside = reference_hidden[at] @ reference_weight.t()
        found = swept(
            logits,
            beside,
            None if targets is None else targets[at],
            None if scale is None else scale[at],
            components,
            counts,
            made,
            in_place=True,
        )
        values = found.values.sum(1, dtype=torch.float64)
        sums[:count] += share * values[:count]
        sums[count] += values[count:].sum()
        if found.gram is not None:
            products += share**2 * found.gram
        if found.logits is not None:
            if by_hidden:
                torch.mm(found.logits, weight, out=of_hidden[at])
            if by_weight:
                _add_product(of_weight, found.logits, rows)
        del logits, beside, found  # before the next chunk's are made
    return (
        sums[count].to(wide, copy=True),
        sums[:count].to(wide, copy=True),
        of_hidden,
        of_weight.to(weight.dtype),
        products if gram else hidden.new_empty(0, dtype=torch.float64),
    )


def _add_product(total: Tensor, slopes: Tensor, rows: Tensor) -> None:
    """`total += slopesᵀ · rows`, added up in the total's precision."""
    if total.dtype == slopes.dtype:
        total.addmm_(slopes.t(), rows)
    elif slopes.is_cuda:  # pragma: no cover  # by `make test-gpu`
        torch.ops.aten.addmm.dtype_out(total, slopes.t(), rows, total.dtype, out=total)
    else:
        total.addmm_(slopes.t().to(total.dtype), rows.to(total.dtype))


def _shapes(hidden: Tensor, weight: Tensor, *problem: Any) -> tuple[Tensor, ...]:
    count, wide, wants = len(problem[5]), _wide(hidden), problem[10]
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(count, dtype=wide),
        torch.empty_like(hidden) if wants[0] else hidden.new_empty(0),
        torch.empty_like(weight) if wants[1] else weight.new_empty(0),
        hidden.new_empty((count, count) if wants[2] else 0, dtype=torch.float64),
    )


compose_linear = operator(
    "compose_linear", _SCHEMA, _compose_linear, _shapes, save_gradients, scale_gradients
)


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
