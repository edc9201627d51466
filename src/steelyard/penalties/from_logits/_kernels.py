"""The Triton kernels: every component of a row in two visits, the second from a cache.

A row is cut into pieces; a work item is one piece. Programs draw tickets in order. Ticket t
stands for the statistics of item t, then the gradient of item t - lag (with JS, in between, the
divergences from the mean, and 2 lag). Whoever has the last piece of a row combines them, in the
order of the pieces: the numbers do not depend on the schedule.

With the lag 0 a program waits for the rest of the row and then finds its piece in its own
processor's cache. It draws the next ticket after that wait, so that all drawn tickets but the
last row's come to an end by themselves: as many programs as a row has pieces have to run at a
time. With a lag of more than the programs the row's statistics are complete as a rule, and the
piece is found in the L2, if at all; an item waits only for items of lower tickets, which running
programs hold, so that any number of programs comes to an end, even one.

There are no barriers and no fences: a number that another program waits for is its own flag,
UNSET until it is written. A program is one warp, so that one computes while another waits; each
thread sums up its own share of a piece, and only the sums go through the warp.

Logarithms are to the base 2 inside, and relative to the row's largest logit, in float32.
"""

import triton
import triton.language as tl

from steelyard.penalties.from_logits._kernel_gradients import (
    slopes_of,
)
from steelyard.penalties.from_logits._kernel_row_values import (
    combine,
    means,
)
from steelyard.penalties.from_logits._kernel_signals import (
    COEFFICIENTS,
    K_P,
    Z_TOP,
    settled,
)
from steelyard.penalties.from_logits._kernel_statistics import (
    statistics,
)
from steelyard.penalties.from_logits._kernel_tiles import (
    LOG2E,
    store_tile,
)


# Whether these are multiples of 16 is of no use: no kernel of its own for that.
@triton.jit(do_not_specialize=["rows", "pieces", "tiles", "lag"])
def sweep_kernel(
    z_ptr, r_ptr, t_ptr, scale_ptr, values, gz_ptr, gr_ptr, gram_ptr, stats_ptr, coefs_ptr, drawn,
    rows, classes, pieces, tiles, lag, z_stride, r_stride, gz_stride, gr_stride,
    slope, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
    KINDS: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr, GZ: tl.constexpr,
    GR: tl.constexpr, GRAM: tl.constexpr, STATS: tl.constexpr, PAIRS: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Sweep over all rows; what each argument is says `_launch.sweep`."""
    JSD: tl.constexpr = (KINDS >> 3) & 1
    BEFORE: tl.constexpr = (KINDS & 1) + ((KINDS >> 1) & 1) + ((KINDS >> 2) & 1)
    SLOPES: tl.constexpr = GZ or GR or GRAM
    # Two tiles at a time save moves between registers, unless there are too few of them.
    UNROLL: tl.constexpr = 1 if GRAM else 2
    unit = slope * LOG2E
    items = rows * pieces
    behind = 0
    if JSD:
        behind += lag
    if SLOPES:
        behind += lag
    thread = tl.arange(0, 32)
    counter = drawn + thread * 0
    ticket = tl.atomic_add(drawn, 1, sem="relaxed") + 1
    while ticket < items + behind:
        draw = thread * 0
        if lag > 0:
            # By the first thread alone, and looked at only at the end: the others do not wait.
            draw = tl.atomic_add(counter, 1, mask=thread == 0, sem="relaxed")
        if ticket < items:
            row = ticket // pieces
            piece = ticket - row * pieces
            share = 1.0
            if SCALED:
                share = tl.load(scale_ptr + row)
            if share != 0:
                z_row = z_ptr + row.to(tl.int64) * z_stride
                r_row = r_ptr + row.to(tl.int64) * r_stride
                stats = stats_ptr + row.to(tl.int64) * (STATS * pieces)
                statistics(
                    z_row, r_row, piece, tiles, classes, unit, stats, pieces,
                    KINDS, VECTOR, PACKED, UNROLL,
                )  # fmt: skip
                if piece == pieces - 1:
                    combine(
                        z_row, r_row, t_ptr + row, values + row, coefs_ptr + row * COEFFICIENTS,
                        stats, rows, classes, pieces, share, unit,
                        w_ent, w_fwd, w_rev, w_z, w_ce, limit_f, limit_r, KINDS, PIECES,
                    )  # fmt: skip
            elif piece == 0:
                for i in tl.static_range(COUNT + 1 + JSD):
                    tl.store(values + i * rows + row, 0.0)
        if JSD:
            item = ticket - lag
            if (item >= 0) & (item < items):
                row = item // pieces
                share = 1.0
                if SCALED:
                    share = tl.load(scale_ptr + row)
                if share != 0:
                    sums = stats_ptr + row.to(tl.int64) * (STATS * pieces) + (STATS - 2) * pieces
                    means(
                        z_ptr + row.to(tl.int64) * z_stride, r_ptr + row.to(tl.int64) * r_stride,
                        values + BEFORE * rows + row, values + (COUNT + 1) * rows + row,
                        coefs_ptr + row * COEFFICIENTS, sums, item - row * pieces, tiles, classes,
                        pieces, share, unit, w_js, VECTOR, PACKED, PIECES,
                    )  # fmt: skip
        if lag == 0:
            if SLOPES:  # wait for the row first: others may wait for what is drawn
                row = ticket // pieces
                share = 1.0
                if SCALED:
                    share = tl.load(scale_ptr + row)
                if share != 0:
                    place = coefs_ptr + row * COEFFICIENTS + (K_P if JSD else Z_TOP)
                    settled(place, tl.load(place, volatile=True))
            draw = tl.atomic_add(counter, 1, mask=thread == 0, sem="relaxed")
        if SLOPES:
            item = ticket - behind
            if (item >= 0) & (item < items):
                row = item // pieces
                piece = item - row * pieces
                gz_row = gz_ptr + row.to(tl.int64) * gz_stride
                gr_row = gr_ptr + row.to(tl.int64) * gr_stride
                products = gram_ptr + item
                share = 1.0
                if SCALED:
                    share = tl.load(scale_ptr + row)
                if share != 0:
                    slopes_of(
                        z_ptr + row.to(tl.int64) * z_stride, r_ptr + row.to(tl.int64) * r_stride,
                        t_ptr + row, gz_row, gr_row, products, coefs_ptr + row * COEFFICIENTS,
                        items, piece, tiles, classes, share, slope, unit,
                        w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
                        KINDS, GZ, GR, GRAM, VECTOR, PACKED, UNROLL,
                    )  # fmt: skip
                else:
                    for i in range(tiles):
                        here = (piece * tiles + i) * (64 * VECTOR)
                        nothing = tl.zeros([32, VECTOR, 2], tl.float32)
                        if GZ:
                            store_tile(gz_row, here, nothing, classes, VECTOR)
                        if GR:
                            store_tile(gr_row, here, nothing, classes, VECTOR)
                    if GRAM:
                        for i in tl.static_range(PAIRS):
                            tl.store(products + i * items, 0.0)
        ticket = tl.sum(tl.where(thread == 0, draw, 0), 0) + 1


@triton.jit
def scale_kernel(x_ptr, factor_ptr, size, TILE: tl.constexpr):
    """Multiply in place, unless by 1: then nothing else is read."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * TILE
        for start in range(first, size, tl.num_programs(0) * TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(x_ptr + at, mask=at < size)
            scaled = x.to(tl.float32) * factor
            tl.store(x_ptr + at, scaled.to(x_ptr.dtype.element_ty), mask=at < size)
