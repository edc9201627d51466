"""Kernels that call one stage of the real ones, or one function over tiles, for their tests."""

# Triton's language has no types, and constants in capitals.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, N803, N806

import triton
import triton.language as tl

from steelyard.penalties.from_logits._triton_components import middle_piece
from steelyard.penalties.from_logits._triton_passes import (
    combine_row,
    gradient_piece,
    piece_statistics,
)
from steelyard.penalties.from_logits._triton_tiles import (
    dot_by_thread,
    limit_ratio,
    load_tile,
    log2,
    max_by_thread,
    peek,
    publish,
    store_tile,
    sum_by_thread,
    to_float32,
    wait_for,
    wait_for_all,
)


@triton.jit
def copy_kernel(x, y, classes, VECTOR: tl.constexpr, PACKED: tl.constexpr):
    for start in range(0, classes, 64 * VECTOR):
        tile = load_tile(x, start, classes, VECTOR, PACKED, "evict_last")
        tile = to_float32(tile, x.dtype.element_ty, VECTOR, PACKED)
        store_tile(y, start, tile, classes, VECTOR)


@triton.jit
def reduce_kernel(x, y, out, VECTOR: tl.constexpr):
    TILE: tl.constexpr = 64 * VECTOR
    a = load_tile(x, 0, TILE, VECTOR, False, "evict_last")
    b = load_tile(y, 0, TILE, VECTOR, False, "evict_last")
    thread = tl.arange(0, 32)
    tl.store(out + thread, sum_by_thread(a))
    tl.store(out + 32 + thread, max_by_thread(a))
    tl.store(out + 64 + thread, dot_by_thread(tl.zeros([32], tl.float32), a, b))


@triton.jit
def ratio_kernel(p, d, ratio, inside, limit, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    clamped, passed = limit_ratio(tl.load(p + at), tl.load(d + at), limit)
    tl.store(ratio + at, clamped)
    tl.store(inside + at, passed)


@triton.jit
def log2_kernel(x, y, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(y + at, log2(tl.load(x + at)))


@triton.jit
def publish_kernel(x, places, COUNT: tl.constexpr):
    for i in tl.static_range(COUNT):
        publish(places + i, tl.load(x + i))


@triton.jit
def wait_kernel(places, out, count, COUNT: tl.constexpr):
    tl.store(out, wait_for(places, tl.load(places, volatile=True)))
    at = tl.arange(0, COUNT)
    valid = at < count
    numbers = wait_for_all(places + at, valid, peek(places + at, valid))
    tl.store(out + 1 + at, numbers)


@triton.jit
def statistics_kernel(
    z, r, stats, tiles, classes, pieces, log2_scale, KINDS: tl.constexpr, VECTOR: tl.constexpr
):
    piece_statistics(
        z, r, tl.program_id(0), tiles, classes, log2_scale, stats, pieces, KINDS, VECTOR, False, 1
    )


@triton.jit
def combine_kernel(
    z, r, t, values, coefs, stats, classes, pieces, row_scale, log2_scale, weights, limits,
    KINDS: tl.constexpr, COUNT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    combine_row(
        z, r, t, values, coefs, stats, 1, classes, pieces, row_scale, log2_scale, weights, limits,
        KINDS, COUNT, PIECES,
    )  # fmt: skip


@triton.jit
def middle_kernel(
    z, r, values, coefs, sums, tiles, classes, pieces, row_scale, log2_scale, weights,
    KINDS: tl.constexpr, COUNT: tl.constexpr, VECTOR: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    middle_piece(
        z, r, values, coefs, sums, tl.program_id(0), tiles, classes, pieces, 1, row_scale,
        log2_scale, weights, KINDS, COUNT, VECTOR, False, PIECES,
    )  # fmt: skip


@triton.jit
def gradient_kernel(
    z, r, t, gz, gr, gram, coefs, tiles, classes, pieces, row_scale, inv_temperature, log2_scale,
    weights, limits, KINDS: tl.constexpr, GR: tl.constexpr, GRAM: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    gradient_piece(
        z, r, t, gz, gr, gram + piece, coefs, pieces, piece, tiles, classes, row_scale,
        inv_temperature, log2_scale, weights, limits, KINDS, True, GR, GRAM, VECTOR, False, 1,
    )  # fmt: skip
