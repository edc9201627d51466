"""The Triton kernels: every component of a row in two visits, the second from a cache.

The sums over a row (softmax, entropy, divergences) have to be known before its gradient, so each
element is visited twice. The floor is memory traffic: to read every input once. So the second visit
has to follow while the data is still in a cache, which one program for each row would not achieve:
128256 classes of bfloat16 are 256 KB, and few rows at a time would not fill the GPU.

**Work items.** A row is cut into pieces; a work item is one piece of one row. Programs are
persistent and draw work ids from an atomic counter, in order. Work id t stands for the statistics
of item t and then the gradient of item t - lag. (Kinds with a middle pass, such as JS, need three
visits: the middle pass is that of item t - lag, and the gradient that of item t - 2 lag.) The
program with the last piece of a row combines its pieces, in their order: the numbers do not depend
on the schedule.

**Lag 0**: a program waits for the other pieces of its row and then finds its own piece in its
processor's L1 cache. It draws its next work id only after that wait, so every drawn id but those of
the last row finishes without further draws. This terminates if as many programs run at a time as a
row has pieces; `sweep` makes sure of it.

**Lag > number of programs**: the row's statistics are complete as a rule, and the piece is found in
the L2 cache, if at all. An item waits only for items with lower work ids, which running programs
hold, so any number of programs terminates, even one.

**Signals.** There are no barriers and no fences: a number that another program waits for is its own
flag (`publish` and `peek` of `_triton_tiles`). A program is a single warp, so that other warps of
the processor compute while it waits; each thread sums up its own share of a piece, and only the
sums cross the warp.

Inside, everything is float32; logarithms are to the base 2 and relative to (nearly) the row's
largest logit. This file and `_triton_passes` (first visit, values of rows, second visit) know no
single kind of component: `_triton_components` does.

References:
    Milakov & Gimelshein (2018), "Online normalizer calculation for softmax", arXiv:1805.02867:
    a softmax from the partial maxima and sums of pieces.
    Merrill & Garland (2016), "Single-pass parallel prefix scan with decoupled look-back": programs
    that draw work in order and wait for their predecessors' published numbers.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from steelyard.penalties.from_logits._components import NEED_REFERENCE, Component
from steelyard.penalties.from_logits._formulas import SweepResult, Wants
from steelyard.penalties.from_logits._triton_components import (
    COEFFICIENTS,
    KERNEL_KINDS,
    WITH_MIDDLE,
    has_middle_pass,
    middle_piece,
    statistics_count,
    wait_for_row,
)
from steelyard.penalties.from_logits._triton_passes import (
    combine_row,
    gradient_piece,
    piece_statistics,
)
from steelyard.penalties.from_logits._triton_tiles import LOG2E, store_tile
from steelyard.penalties.from_logits.cluster.launch import symmetric


# Compiling again where one of these is a multiple of 16, Triton's default, gains nothing.
@triton.jit(do_not_specialize=["rows", "pieces", "tiles", "lag"])
def sweep_kernel(
    z_ptr, r_ptr, t_ptr, scale_ptr, values, gz_ptr, gr_ptr, gram_ptr, stats_ptr, coefs_ptr,
    counter_ptr, rows, classes, pieces, tiles, lag, z_stride, r_stride, gz_stride, gr_stride,
    inv_temperature, weights, limits,
    KINDS: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr, GZ: tl.constexpr,
    GR: tl.constexpr, GRAM: tl.constexpr, STATS: tl.constexpr, PAIRS: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Compute the values and gradients of all rows; `sweep` documents the inputs.

    Inputs:
        z_ptr: Logits, `[rows, classes]`, with `z_stride`.
        r_ptr: Reference, the same shape, with `r_stride`.
        t_ptr: Targets, `[rows]`.
        scale_ptr: Factor of each row, `[rows]`, read if SCALED; a row of factor 0 is not read.
        values: `[COUNT + 1, rows]`: each component, then their weighted total. With a middle pass
            there is one more row: what its kinds add to the total.
        gz_ptr: Gradient by the logits, written if GZ.
        gr_ptr: Gradient by the reference, written if GR.
        gram_ptr: `[PAIRS, rows, pieces]`: inner products of the components' gradients, if GRAM.
        stats_ptr: Workspace `[rows, STATS, pieces]`, UNSET.
        coefs_ptr: Workspace `[rows, COEFFICIENTS]`, UNSET.
        counter_ptr: The last work id drawn, -1 at first.
        rows: Number of rows; then of classes, of pieces in a row and of tiles in a piece.
        lag: Work ids between an item's first visit and its next.
        inv_temperature: 1 / T.
        weights: Weights of the components, a tuple by kind, 0 for kinds that are not computed.
        limits: Limits of the log ratios in nats, a tuple by kind.
        KINDS: Bit k is set if component kind k is computed; COUNT of them.
        VECTOR: Elements in 16 bytes.
        PACKED: Whether 16-bit floats are loaded two to a word.
        PIECES: `pieces`, rounded up to a power of 2.
    """
    MIDDLE: tl.constexpr = 1 if (WITH_MIDDLE & KINDS) != 0 else 0
    GRADIENTS: tl.constexpr = GZ or GR or GRAM
    # Two tiles in a turn save moves between registers; inner products leave too few registers.
    UNROLL: tl.constexpr = 1 if GRAM else 2
    log2_scale = inv_temperature * LOG2E
    items = rows * pieces
    total_lag = 0
    if MIDDLE:
        total_lag += lag
    if GRADIENTS:
        total_lag += lag
    thread = tl.arange(0, 32)
    counter = counter_ptr + thread * 0
    work_id = tl.atomic_add(counter_ptr, 1, sem="relaxed") + 1
    while work_id < items + total_lag:
        drawn = thread * 0
        if lag > 0:
            # Drawn early, by the first thread alone, and read at the end: its latency is hidden.
            drawn = tl.atomic_add(counter, 1, mask=thread == 0, sem="relaxed")
        if work_id < items:
            row = work_id // pieces
            piece = work_id - row * pieces
            row_scale = 1.0
            if SCALED:
                row_scale = tl.load(scale_ptr + row)
            if row_scale != 0:
                z_row = z_ptr + row.to(tl.int64) * z_stride
                r_row = r_ptr + row.to(tl.int64) * r_stride
                stats = stats_ptr + row.to(tl.int64) * (STATS * pieces)
                piece_statistics(
                    z_row, r_row, piece, tiles, classes, log2_scale, stats, pieces,
                    KINDS, VECTOR, PACKED, UNROLL,
                )  # fmt: skip
                if piece == pieces - 1:
                    combine_row(
                        z_row, r_row, t_ptr + row, values + row, coefs_ptr + row * COEFFICIENTS,
                        stats, rows, classes, pieces, row_scale, log2_scale,
                        weights, limits, KINDS, COUNT, PIECES,
                    )  # fmt: skip
            elif piece == 0:
                for i in tl.static_range(COUNT + 1 + MIDDLE):
                    tl.store(values + i * rows + row, 0.0)
        if MIDDLE:
            item = work_id - lag
            if (item >= 0) & (item < items):
                row = item // pieces
                row_scale = 1.0
                if SCALED:
                    row_scale = tl.load(scale_ptr + row)
                if row_scale != 0:
                    sums = stats_ptr + row.to(tl.int64) * (STATS * pieces) + (STATS - 2) * pieces
                    middle_piece(
                        z_ptr + row.to(tl.int64) * z_stride, r_ptr + row.to(tl.int64) * r_stride,
                        values + row, coefs_ptr + row * COEFFICIENTS, sums, item - row * pieces,
                        tiles, classes, pieces, rows, row_scale, log2_scale, weights,
                        KINDS, COUNT, VECTOR, PACKED, PIECES,
                    )  # fmt: skip
        if lag == 0:
            # Wait for the row before drawing: otherwise programs could wait for the statistics of
            # an item that is held by a program which itself still waits for its row.
            if GRADIENTS:
                row = work_id // pieces
                row_scale = 1.0
                if SCALED:
                    row_scale = tl.load(scale_ptr + row)
                if row_scale != 0:
                    wait_for_row(coefs_ptr + row * COEFFICIENTS, KINDS)
            drawn = tl.atomic_add(counter, 1, mask=thread == 0, sem="relaxed")
        if GRADIENTS:
            item = work_id - total_lag
            if (item >= 0) & (item < items):
                row = item // pieces
                piece = item - row * pieces
                gz_row = gz_ptr + row.to(tl.int64) * gz_stride
                gr_row = gr_ptr + row.to(tl.int64) * gr_stride
                gram_piece = gram_ptr + item
                row_scale = 1.0
                if SCALED:
                    row_scale = tl.load(scale_ptr + row)
                if row_scale != 0:
                    gradient_piece(
                        z_ptr + row.to(tl.int64) * z_stride, r_ptr + row.to(tl.int64) * r_stride,
                        t_ptr + row, gz_row, gr_row, gram_piece, coefs_ptr + row * COEFFICIENTS,
                        items, piece, tiles, classes, row_scale, inv_temperature, log2_scale,
                        weights, limits, KINDS, GZ, GR, GRAM, VECTOR, PACKED, UNROLL,
                    )  # fmt: skip
                else:
                    for i in range(tiles):
                        here = (piece * tiles + i) * (64 * VECTOR)
                        zeros = tl.zeros([32, VECTOR, 2], tl.float32)
                        if GZ:
                            store_tile(gz_row, here, zeros, classes, VECTOR)
                        if GR:
                            store_tile(gr_row, here, zeros, classes, VECTOR)
                    if GRAM:
                        for i in tl.static_range(PAIRS):
                            tl.store(gram_piece + i * items, 0.0)
        work_id = tl.sum(tl.where(thread == 0, drawn, 0), 0) + 1


@triton.jit
def scale_kernel(x_ptr, factor_ptr, size, TILE: tl.constexpr):
    """Multiply in place; by 1, the usual factor of a loss, read and write nothing."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * TILE
        for start in range(first, size, tl.num_programs(0) * TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + at, mask=at < size)
            scaled = x.to(tl.float32) * factor
            tl.store(x_ptr + at, scaled.to(x_ptr.dtype.element_ty), mask=at < size)


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
            cache; if not, it goes on with other items and returns later (`lag`, see above).
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
    own for each kind (`_triton_components`). Other inputs take the plain formulas.
    """
    kinds = [component.kind for component in components]
    return (
        all(x is None or x.dtype in _FLOATS for x in (logits, reference))
        and logits.numel() > 0
        and all(kind in KERNEL_KINDS for kind in kinds)
        and all(a < b for a, b in pairwise(kinds))
        and len({component.temperature for component in components}) == 1
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
    kinds = [component.kind for component in components]
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
    limits = {component.kind: component.limit for component in components}
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
