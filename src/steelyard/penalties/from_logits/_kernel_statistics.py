"""The first visit to a piece of a row: sums from which the row's numbers can be made."""

import triton
import triton.language as tl

from steelyard.penalties.from_logits._kernel_signals import (
    publish,
)
from steelyard.penalties.from_logits._kernel_tiles import (
    by_thread,
    dot_by_thread,
    floats,
    load_tile,
    logs,
    most_by_thread,
)

FEW = tl.constexpr(256)  # classes at a time where it is seldom and registers are scarce
FULL = tl.constexpr(1e30)  # a sum in float32 may well become as large


@triton.jit
def _largest(row, start, stop, unit):
    """The largest of some classes; one at a time would do, it is that seldom."""
    top = float("-inf")
    for i in range(start, stop, FEW):
        column = i + tl.arange(0, FEW)
        x = tl.load(row + column, mask=column < stop, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0) * unit)
    return top


@triton.jit
def statistics(
    z_row, r_row, piece, tiles, classes, unit, stats, pieces, KINDS: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One piece: a level, Σ 2 ** (x - level) and what the components need beside it."""
    ENT: tl.constexpr = KINDS & 1
    FWD: tl.constexpr = (KINDS >> 1) & 1
    REV: tl.constexpr = (KINDS >> 2) & 1
    COMPARES: tl.constexpr = (KINDS & 14) != 0
    TILE: tl.constexpr = 64 * VECTOR
    start = piece * (tiles * TILE)
    bound = tl.minimum(start + tiles * TILE, classes)
    z_type: tl.constexpr = z_row.dtype.element_ty
    r_type: tl.constexpr = r_row.dtype.element_ty
    z = load_tile(z_row, start, bound, VECTOR, PACKED, "evict_last")
    z_next = load_tile(z_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    r = z
    r_next = z
    if COMPARES:
        r = load_tile(r_row, start, bound, VECTOR, PACKED, "evict_last")
        r_next = load_tile(r_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    top = tl.max(most_by_thread(floats(z, z_type, VECTOR, PACKED)), 0) * unit
    top_r = 0.0
    if COMPARES:
        top_r = tl.max(most_by_thread(floats(r, r_type, VECTOR, PACKED)), 0) * unit
    # The level is the largest of the first tile. Should the sum overflow, which takes a logit that
    # is 70 greater, or that tile be -inf throughout, the largest of all is looked for.
    tries = 0
    total = 0.0
    total_r = 0.0
    moment = 0.0
    cross_f = 0.0
    cross_r = 0.0
    most = 0.0
    while tries < 2:
        base = tl.where(top == float("-inf"), 0.0, top)
        base_r = tl.where(top_r == float("-inf"), 0.0, top_r)
        sum_e = tl.zeros([32], tl.float32)
        sum_ex = tl.zeros([32], tl.float32)
        sum_f = tl.zeros([32], tl.float32)
        sum_ed = tl.zeros([32], tl.float32)
        sum_fd = tl.zeros([32], tl.float32)
        max_d = tl.zeros([32], tl.float32)
        for first in range(0, tiles, UNROLL):
            for second in tl.static_range(UNROLL):
                here = start + (first + second + 2) * TILE
                z_last = load_tile(z_row, here, bound, VECTOR, PACKED, "evict_last")
                r_last = z_last
                if COMPARES:
                    r_last = load_tile(r_row, here, bound, VECTOR, PACKED, "evict_last")
                x = logs(floats(z, z_type, VECTOR, PACKED), unit, base)
                e = tl.exp2(x)
                sum_e += by_thread(e)
                if ENT:
                    sum_ex = dot_by_thread(sum_ex, e, x)
                if COMPARES:
                    y = logs(floats(r, r_type, VECTOR, PACKED), unit, base_r)
                    f = tl.exp2(y)
                    sum_f += by_thread(f)
                    d = x - y
                    if FWD:
                        sum_ed = dot_by_thread(sum_ed, e, d)
                    if REV:
                        sum_fd = dot_by_thread(sum_fd, f, d)
                    if FWD or REV:
                        max_d = tl.maximum(max_d, most_by_thread(tl.abs(d)))
                z = z_next
                r = r_next
                z_next = z_last
                r_next = r_last
        total = tl.sum(sum_e, 0)
        if ENT:
            moment = tl.sum(sum_ex, 0)
        if COMPARES:
            total_r = tl.sum(sum_f, 0)
        if FWD:
            cross_f = tl.sum(sum_ed, 0)
        if REV:
            cross_r = -tl.sum(sum_fd, 0)
        if FWD or REV:
            most = tl.max(max_d, 0)
        fine = (top != float("-inf")) & (total < FULL)
        if COMPARES:
            fine = fine & (top_r != float("-inf")) & (total_r < FULL)
        tries += 1
        if fine:
            tries = 2
        elif tries == 1:
            top = _largest(z_row, start, bound, unit)
            z = load_tile(z_row, start, bound, VECTOR, PACKED, "evict_last")
            z_next = load_tile(z_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
            if COMPARES:
                top_r = _largest(r_row, start, bound, unit)
                r = load_tile(r_row, start, bound, VECTOR, PACKED, "evict_last")
                r_next = load_tile(r_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    publish(stats + piece, top)
    publish(stats + pieces + piece, total)
    slot = stats + 2 * pieces + piece
    if ENT:
        publish(slot, moment)
        slot += pieces
    if COMPARES:
        publish(slot, top_r)
        publish(slot + pieces, total_r)
        slot += 2 * pieces
    if FWD:
        publish(slot, cross_f)
        slot += pieces
    if REV:
        publish(slot, cross_r)
        slot += pieces
    if FWD or REV:
        publish(slot, most)
