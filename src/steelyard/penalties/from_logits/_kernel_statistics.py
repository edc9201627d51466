"""First visit to a piece of a row: the sums from which the row's values follow.

With x the logits and y the reference's, both times log2(e) / T, a shift m for each (near the
largest number), `e = 2^(x - m)`, `f = 2^(y - m')` and `d = (x - m) - (y - m')`, a piece hands on

    m, sum e                    softmax: p = e / sum e
    m', sum f                   softmax of the reference: q = f / sum f
    sums of single components   `_kernel_components.add_to_sums`

`_kernel_row_values.combine_row` adds the pieces up, each corrected by its own shift. That is the
one-pass ("online") softmax, with one correction for each piece rather than for each element:
Milakov & Gimelshein (2018), "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

import triton
import triton.language as tl

from steelyard.penalties.from_logits._kernel_components import (
    WITH_REFERENCE,
    add_to_sums,
    new_sums,
    publish_sums,
    reduce_sums,
)
from steelyard.penalties.from_logits._kernel_signals import (
    publish,
)
from steelyard.penalties.from_logits._kernel_tiles import (
    SMALL_TILE,
    clamped_log2,
    load_tile,
    max_by_thread,
    sum_by_thread,
    to_float32,
)

OVERFLOW = tl.constexpr(1e30)  # a sum of 2^(x - m) this large (float32 ends at 3e38) is not trusted


@triton.jit
def _max_logit(row, start, stop, log2_scale):
    """Largest scaled logit of the classes from `start` to `stop`; rare, so not tuned."""
    top = float("-inf")
    for i in range(start, stop, SMALL_TILE):
        column = i + tl.arange(0, SMALL_TILE)
        x = tl.load(row + column, mask=column < stop, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0) * log2_scale)
    return top


@triton.jit
def piece_statistics(
    z_row, r_row, piece, tiles, classes, log2_scale, stats, pieces, KINDS: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum up one piece and publish its statistics.

    Args:
        z_row: Pointer to the row's logits, `[classes]`.
        r_row: The same for the reference.
        piece: Which piece of the row: its classes begin at `piece * tiles * 64 * VECTOR`.
        tiles: Number of tiles in a piece.
        classes: Length of the row.
        log2_scale: log2(e) / T.
        stats: Pointer to the row's statistics, `[STATS, pieces]`.
        pieces: Number of pieces in a row.
        KINDS: Bit k is set if component kind k is computed.
        VECTOR: Elements in 16 bytes.
        PACKED: Whether 16-bit floats are loaded two to a word.
        UNROLL: Tiles in one turn of the loop.
    """
    COMPARES: tl.constexpr = (WITH_REFERENCE & KINDS) != 0
    TILE: tl.constexpr = 64 * VECTOR
    start = piece * (tiles * TILE)
    bound = tl.minimum(start + tiles * TILE, classes)
    z_type: tl.constexpr = z_row.dtype.element_ty
    r_type: tl.constexpr = r_row.dtype.element_ty
    # Two tiles are always on their way: a warp waits for memory only at the beginning. The second
    # visit reads the piece again, so the caches are asked to evict it last.
    z = load_tile(z_row, start, bound, VECTOR, PACKED, "evict_last")
    z_next = load_tile(z_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    r = z
    r_next = z
    if COMPARES:
        r = load_tile(r_row, start, bound, VECTOR, PACKED, "evict_last")
        r_next = load_tile(r_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    top = tl.max(max_by_thread(to_float32(z, z_type, VECTOR, PACKED)), 0) * log2_scale
    top_r = 0.0
    if COMPARES:
        top_r = tl.max(max_by_thread(to_float32(r, r_type, VECTOR, PACKED)), 0) * log2_scale
    # The shift m is the maximum of the first tile, not of the piece: that takes no pass of its
    # own. It is good enough unless the sum overflows (which takes a logit that is larger by 70) or
    # the first tile is all -inf; then the piece is summed up once more by its true maximum.
    attempt = 0
    total = tl.full([], 0.0, tl.float32)
    total_r = total
    reduced = reduce_sums(new_sums(), total, 0)
    while attempt < 2:
        base = tl.where(top == float("-inf"), 0.0, top)
        base_r = tl.where(top_r == float("-inf"), 0.0, top_r)
        sum_e = tl.zeros([32], tl.float32)
        sum_f = tl.zeros([32], tl.float32)
        sums = new_sums()
        for first in range(0, tiles, UNROLL):
            for second in tl.static_range(UNROLL):
                here = start + (first + second + 2) * TILE
                z_last = load_tile(z_row, here, bound, VECTOR, PACKED, "evict_last")
                r_last = z_last
                if COMPARES:
                    r_last = load_tile(r_row, here, bound, VECTOR, PACKED, "evict_last")
                x = clamped_log2(to_float32(z, z_type, VECTOR, PACKED), log2_scale, base)
                e = tl.exp2(x)
                sum_e += sum_by_thread(e)
                if COMPARES:
                    y = clamped_log2(to_float32(r, r_type, VECTOR, PACKED), log2_scale, base_r)
                    f = tl.exp2(y)
                    sum_f += sum_by_thread(f)
                    sums = add_to_sums(sums, e, x, f, x - y, KINDS)
                else:
                    sums = add_to_sums(sums, e, x, e, x, KINDS)
                z = z_next
                r = r_next
                z_next = z_last
                r_next = r_last
        total = tl.sum(sum_e, 0)
        if COMPARES:
            total_r = tl.sum(sum_f, 0)
        reduced = reduce_sums(sums, total, KINDS)
        is_exact = (top != float("-inf")) & (total < OVERFLOW)
        if COMPARES:
            is_exact = is_exact & (top_r != float("-inf")) & (total_r < OVERFLOW)
        attempt += 1
        if is_exact:
            attempt = 2
        elif attempt == 1:
            top = _max_logit(z_row, start, bound, log2_scale)
            z = load_tile(z_row, start, bound, VECTOR, PACKED, "evict_last")
            z_next = load_tile(z_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
            if COMPARES:
                top_r = _max_logit(r_row, start, bound, log2_scale)
                r = load_tile(r_row, start, bound, VECTOR, PACKED, "evict_last")
                r_next = load_tile(r_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    publish(stats + piece, top)
    publish(stats + pieces + piece, total)
    place = stats + 2 * pieces + piece
    if COMPARES:
        publish(place, top_r)
        publish(place + pieces, total_r)
        place += 2 * pieces
    publish_sums(place, pieces, reduced, KINDS)
