"""Launching the kernels: which cases they take, the workspace, and the shape of the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from steelyard.penalties.from_logits._components import FORWARD, REVERSE, Component
from steelyard.penalties.from_logits._kernels import (
    COEFFICIENTS,
    STATISTICS,
    scale_kernel,
    sweep_kernel,
)
from steelyard.penalties.from_logits._sweep import Swept, Wants

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_KINDS = 6


class Shape(NamedTuple):
    """How the work is cut: classes in a piece, warps of a program, programs on a processor."""

    tile: int
    warps: int
    programs: int


def shape_for(classes: int, wants: Wants) -> Shape:
    """The shape that measured best on an H200; small rows make one piece."""
    tile = 4096
    shape = Shape(tile, 8 if wants.gram else 4, 4)
    if classes < tile:
        small = max(triton.next_power_of_2(classes), 128)
        return Shape(small, max(min(small // 512, shape.warps), 1), 8)
    return shape


def fits(logits: Tensor, reference: Tensor | None, components: Sequence[Component]) -> bool:
    """Whether the kernels take these inputs: each kind once, all at one temperature."""
    kinds = [each.kind for each in components]
    return (
        all(x is None or x.dtype in _FLOATS for x in (logits, reference))
        and logits.numel() > 0
        and len(set(kinds)) == len(kinds)
        and len({each.temperature for each in components}) == 1
    )


def sweep(
    logits: Tensor,
    reference: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
    components: Sequence[Component],
    weights: Sequence[float],
    wants: Wants,
    *,
    shape: Shape | None = None,
    into: Tensor | None = None,
) -> Swept:
    """As `_sweep.sweep`, in one launch.

    Args:
        logits: `[rows, classes]`.
        reference: The same shape, or None.
        targets: `[rows]`, or None.
        scale: `[rows]`, or None.
        components: Each kind once, all at one temperature.
        weights: One for each.
        wants: What else to compute.
        shape: How to cut the work; None is what measured best.
        into: Where the gradient by the logits goes: the logits themselves, if it may.
    """
    z = _rows(logits)
    r = z if reference is None else _rows(reference)
    rows, classes = z.shape
    shape = shape or shape_for(classes, wants)
    pieces = triton.cdiv(classes, shape.tile)
    made = z.new_empty((_KINDS, rows), dtype=torch.float32)
    by_logits = (torch.empty_like(z) if into is None else into) if wants.logits else None
    by_reference = torch.empty_like(r) if wants.reference else None
    count = len(components)
    pairs = count * (count + 1) // 2
    products = (
        z.new_empty((rows, pieces, pairs), dtype=torch.float32) if wants.gram else None
    )
    stats = z.new_empty(rows * pieces * STATISTICS, dtype=torch.float32)
    coefs = z.new_empty(rows * COEFFICIENTS, dtype=torch.float32)
    sync = torch.zeros(1 + 4 * rows, dtype=torch.int32, device=z.device)
    by_kind = {each.kind: weight for each, weight in zip(components, weights, strict=True)}
    limits = {each.kind: each.limit for each in components}
    programs = min(_processors(z) * shape.programs, rows * pieces)
    sweep_kernel[(programs,)](
        z, r, targets if targets is not None else sync, scale if scale is not None else made,
        made, _or(by_logits, z), _or(by_reference, r), _or(products, made), stats, coefs, sync,
        rows, classes, pieces, programs + 2 * pieces,
        z.stride(0), r.stride(0), _or(by_logits, z).stride(0), _or(by_reference, r).stride(0),
        1.0 / components[0].temperature, *(by_kind.get(kind, 0.0) for kind in range(_KINDS)),
        limits.get(FORWARD, math.inf), limits.get(REVERSE, math.inf),
        KINDS=sum(1 << kind for kind in by_kind),
        SCALED=scale is not None, GZ=wants.logits, GR=wants.reference, GRAM=wants.gram,
        PAIRS=pairs, TILE=shape.tile, PIECES=triton.next_power_of_2(pieces),
        num_warps=shape.warps,
    )  # fmt: skip
    values = made[[each.kind for each in components]]
    gram = None if products is None else _gram(products, scale, components)
    return Swept(values, by_logits, by_reference, gram)


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiply a dense tensor in place by a number on its device, without waiting for it."""
    tile = 4096
    scale_kernel[(triton.cdiv(x.numel(), tile),)](x, factor, x.numel(), TILE=tile)


def _gram(products: Tensor, scale: Tensor | None, components: Sequence[Component]) -> Tensor:
    """The symmetric matrix of inner products, from those of each piece, by order of kind."""
    by_row = products.sum(1, dtype=torch.float64)
    total = by_row.sum(0) if scale is None else scale.double().square() @ by_row
    count = len(components)
    order = sorted(range(count), key=lambda i: components[i].kind)
    index = torch.zeros(count, count, dtype=torch.int64)
    n = 0
    for i in range(count):
        for j in range(i, count):
            index[order[i], order[j]] = index[order[j], order[i]] = n
            n += 1
    return total[index.to(total.device)]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer has to be there, even where nothing is read."""
    return other if x is None else x


def _processors(x: Tensor) -> int:
    if not x.is_cuda:
        return 1  # the interpreter
    properties: Any = torch.cuda.get_device_properties(x.device)
    return int(properties.multi_processor_count)
