"""Launch of the kernels: the inputs that they support, the workspace, and the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.penalties.from_logits._blockwise import SweepResult, Wants
from steelyard.penalties.from_logits._components import NEED_REFERENCE, Component
from steelyard.penalties.from_logits._kernel_components import (
    COEFFICIENTS,
    KERNEL_KINDS,
    has_middle_pass,
    statistics_count,
)
from steelyard.penalties.from_logits._kernels import scale_kernel, sweep_kernel
from steelyard.penalties.from_logits.cluster.launch import symmetric

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_NARROW = (torch.bfloat16, torch.float16)


class Shape(NamedTuple):
    """Division of the work among programs.

    Attributes:
        tiles: Tiles in a piece of a row; a tile is 64 · 16 bytes.
        programs: Programs on a processor (streaming multiprocessor); a program is one warp.
        registers: Maximum of a thread; None leaves it to the compiler. Fewer registers let more
            programs run at a time, until the compiler has to spill them to memory.
        waits: Whether a program waits for the rest of its row, and then finds its piece in the L1
            cache; if not, it goes on with other items and returns later (`_kernels`: lag).
    """

    tiles: int
    programs: int
    registers: int | None = None
    waits: bool = True


def shape_for(kinds: Sequence[int], wants: Wants) -> Shape:
    """Shape that measured best on an H200, at 128256 classes of bfloat16."""
    if wants.gram:
        return Shape(16, 20, 128, waits=False)
    if has_middle_pass(kinds):
        return Shape(16, 20, 96, waits=False)
    if NEED_REFERENCE.intersection(kinds):
        return Shape(8, 20, None if wants.reference else 96)
    return Shape(8, 24)


def fits(logits: Tensor, reference: Tensor | None, components: Sequence[Component]) -> bool:
    """Return whether the kernels support the inputs.

    They need floats of at most 32 bits, each kind once, all at one temperature, and pieces of their
    own for each kind (`_kernel_components`). Other inputs take the plain formulas.
    """
    kinds = [each.kind for each in components]
    return (
        all(x is None or x.dtype in _FLOATS for x in (logits, reference))
        and logits.numel() > 0
        and all(kind in KERNEL_KINDS for kind in kinds)
        and all(a < b for a, b in pairwise(kinds))
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
) -> SweepResult:
    """Compute what `_blockwise.sweep` computes, in one launch.

    Args:
        logits: `[rows, classes]`.
        reference: The same shape, or None.
        targets: `[rows]`, or None.
        scale: `[rows]`, or None.
        components: Each kind once, all at one temperature.
        weights: Weight of each component in the total.
        wants: Outputs to compute beside the values.
        shape: Division of the work; None is the one that measured best.
        into: Memory for the gradient by the logits; it may be the logits themselves, since an
            element is read for the last time before its gradient is written.
    """
    z = _rows(logits)
    r = z if reference is None else _rows(reference)
    # The kernel reads row i's target at address i: a column of a matrix has a stride.
    targets = None if targets is None else targets.contiguous()
    rows, classes = z.shape
    vector = 16 // z.element_size()
    kinds = [each.kind for each in components]
    shape = shape or shape_for(kinds, wants)
    tiles = min(shape.tiles, _cdiv(classes, 64 * vector))
    pieces = _cdiv(classes, 64 * vector * tiles)
    # The components' values, then the weighted total without the kinds of the middle pass, then
    # what those add to it: they are known later, and two programs would add in no fixed order.
    values = z.new_empty((len(kinds) + 1 + has_middle_pass(kinds), rows), dtype=torch.float32)
    by_logits = (torch.empty_like(z) if into is None else into) if wants.logits else None
    by_reference = torch.empty_like(r) if wants.reference else None
    pairs = len(kinds) * (len(kinds) + 1) // 2
    products = z.new_empty((pairs, rows, pieces), dtype=torch.float32) if wants.gram else None
    statistics = statistics_count(kinds)
    # One allocation, filled with UNSET (-1): the counter of work ids, the pieces' statistics
    # `[rows, statistics, pieces]`, the rows' coefficients `[rows, COEFFICIENTS]`.
    size = 1 + rows * pieces * statistics
    shared = torch.full((size + rows * COEFFICIENTS.value,), -1, dtype=torch.int32, device=z.device)
    by_kind = dict(zip(kinds, weights, strict=True))
    limits = {each.kind: each.limit for each in components}
    processors = _processors(z.device)
    programs = min(processors * shape.programs, rows * pieces)
    # Waiting terminates if all pieces of a row run at the same time. One program fits on every
    # processor, so a row of at most that many pieces is safe. Else the lag exceeds the ids that
    # running programs may hold, so that a row is complete, as a rule, when it is visited again.
    lag = 0 if shape.waits and pieces <= processors else programs + 2 * pieces
    sweep_kernel[(programs,)](
        z, r, _pointer(targets, shared), _pointer(scale, values), values, _pointer(by_logits, z),
        _pointer(by_reference, r), _pointer(products, values), shared[1:], shared[size:], shared,
        rows, classes, pieces, tiles, lag, z.stride(0), r.stride(0),
        _pointer(by_logits, z).stride(0), _pointer(by_reference, r).stride(0),
        1.0 / components[0].temperature, tuple(by_kind.get(kind, 0.0) for kind in KERNEL_KINDS),
        tuple(limits.get(kind, math.inf) for kind in KERNEL_KINDS),
        KINDS=sum(1 << kind for kind in kinds), COUNT=len(kinds),
        SCALED=scale is not None, GZ=wants.logits, GR=wants.reference, GRAM=wants.gram,
        STATS=statistics, PAIRS=pairs, VECTOR=vector, PACKED=_is_packed(z, r),
        PIECES=1 << (pieces - 1).bit_length(), num_warps=1, enable_fp_fusion=True,
        maxnreg=shape.registers,
    )  # fmt: skip
    gram = None if products is None else _gram(products, len(kinds))
    return SweepResult(values, by_logits, by_reference, gram)


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiply a dense tensor in place by a scalar on its device, without synchronizing."""
    tile = 4096
    programs = min(_cdiv(x.numel(), tile), 8 * _processors(x.device))
    scale_kernel[(programs,)](x, factor, x.numel(), TILE=tile)


def _cdiv(a: int, b: int) -> int:
    """Ceiling of a / b; `triton.cdiv` takes 20 µs a call."""
    return -(-a // b)


def _gram(products: Tensor, count: int) -> Tensor:
    """Symmetric matrix of inner products, summed over pieces in float64."""
    return symmetric(products.sum((1, 2), dtype=torch.float64), count)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_packed(z: Tensor, r: Tensor) -> bool:
    """Return whether both hold 16-bit floats in rows that divide into aligned 32-bit words."""
    return all(
        x.dtype in _NARROW and (x.shape[1] | x.stride(0)) % 2 == 0 and x.data_ptr() % 4 == 0
        for x in (z, r)
    )


def _pointer(x: Tensor | None, other: Tensor) -> Tensor:
    """`x`, or another pointer if it is None: the kernel needs one even if it is not read."""
    return other if x is None else x


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
