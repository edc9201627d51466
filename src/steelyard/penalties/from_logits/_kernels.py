"""The Triton kernels: every component of a row in two visits, the second one served by the L2.

A row is cut into pieces; a work item is one piece. Programs draw tickets in order. Ticket t
stands for the statistics of item t, then the gradient of item t - lag (with JS in between the
divergences from the mean, and 2 lag): by then the row's statistics are complete, as a rule, and
the piece is still in the L2. An item waits only for items of lower tickets, which running programs
hold, so that any number of programs comes to an end, even one alone. Whoever brings the last piece
of a row combines them, in the order of the pieces: the numbers do not depend on the schedule.

Logarithms are to the base 2 inside, relative to the row's largest logit, in float32.
"""

import triton
import triton.language as tl

LOG_ZERO = tl.constexpr(-1e30)  # stands for log 0, as in `divergences`
HUGE = tl.constexpr(1e29)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)

STATISTICS = 10  # floats for each piece, below
TOP_Z, SUM_Z, MOMENT, TOP_R, SUM_R, CROSS_F, CROSS_R, LEAST, MOST, SPARE = (
    tl.constexpr(i) for i in range(STATISTICS)
)
COEFFICIENTS = 12  # floats for each row
Z_TOP, Z_LEVEL, R_TOP, R_LEVEL, H, K_F, MASS_F, K_R, MASS_R, LIMITED, K_P, K_Q = (
    tl.constexpr(i) for i in range(COEFFICIENTS)
)


@triton.jit
def _shifted(x, top, unit):
    """`x - top` to the base 2, at least LOG_ZERO; NaN stays."""
    return tl.maximum((x - top) * unit, LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _finite(top):
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _limited(p, d, limit):
    """What the limit leaves of a log ratio, and where it passes a gradient."""
    ratio = tl.where(d > HUGE, float("inf"), d)  # log 0 on the other side
    ratio = tl.minimum(tl.maximum(ratio, -limit), limit)
    inside = tl.where(tl.abs(d) <= limit, 1.0, 0.0)
    return tl.where(p == 0, 0.0, ratio), inside


@triton.jit
def _wait(ready):
    seen = tl.atomic_add(ready, 0, sem="acquire")
    while seen == 0:
        seen = tl.atomic_add(ready, 0, sem="acquire")


@triton.jit
def _sum(stats, which, piece, there, pieces):
    return tl.load(stats + which * pieces + piece, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _gather(
    z_row, r_row, t_row, values, coefs, stats, row, rows, classes, pieces, slope, limit_f, limit_r,
    COMPARES: tl.constexpr, ENT: tl.constexpr, FWD: tl.constexpr, REV: tl.constexpr,
    ZL: tl.constexpr, CE: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Combine the statistics of a row's pieces into its values and coefficients."""
    unit = slope * LOG2E
    piece = tl.arange(0, PIECES)
    there = piece < pieces
    tops = tl.load(
        stats + TOP_Z * pieces + piece, mask=there, other=float("-inf"), cache_modifier=".cg"
    )
    top = _finite(tl.max(tops, 0))
    off_z = tl.where(tops == float("-inf"), 0.0, (tops - top) * unit)
    part_z = tl.where(tops == float("-inf"), 0.0, tl.exp2(off_z))
    each_z = _sum(stats, SUM_Z, piece, there, pieces)
    sum_z = tl.sum(part_z * each_z, 0)
    dead = sum_z == 0
    over_z = 1.0 / tl.where(dead, 1.0, sum_z)
    level = tl.log2(tl.where(dead, 1.0, sum_z))
    tl.store(coefs + Z_TOP, top)
    tl.store(coefs + Z_LEVEL, level)
    if ENT:
        moment = _sum(stats, MOMENT, piece, there, pieces)
        h = level - tl.sum(part_z * (moment + each_z * off_z), 0) * over_z
        tl.store(coefs + H, h)
        tl.store(values + 0 * rows + row, h * LN2)
    if ZL:
        whole = tl.where(dead, float("inf"), top * slope + level * LN2)
        tl.store(values + 4 * rows + row, whole * whole)
    if CE:
        target = tl.load(t_row)
        known = (target >= 0) & (target < classes)
        hit = tl.load(z_row + target, mask=known, other=float("nan")).to(tl.float32)
        tl.store(values + 5 * rows + row, -((hit - top) * unit - level) * LN2)
    if COMPARES:
        tops_r = tl.load(
            stats + TOP_R * pieces + piece, mask=there, other=float("-inf"), cache_modifier=".cg"
        )
        top_r = _finite(tl.max(tops_r, 0))
        off_r = tl.where(tops_r == float("-inf"), 0.0, (tops_r - top_r) * unit)
        part_r = tl.where(tops_r == float("-inf"), 0.0, tl.exp2(off_r))
        each_r = _sum(stats, SUM_R, piece, there, pieces)
        sum_r = tl.sum(part_r * each_r, 0)
        dead_r = sum_r == 0
        over_r = 1.0 / tl.where(dead_r, 1.0, sum_r)
        level_r = tl.log2(tl.where(dead_r, 1.0, sum_r))
        tl.store(coefs + R_TOP, top_r)
        tl.store(coefs + R_LEVEL, level_r)
        if FWD or REV:
            off = off_z - off_r
            gap = level_r - level
            least = tl.min(tl.where(there, _sum(stats, LEAST, piece, there, pieces) + off, 0.0), 0)
            most = tl.max(tl.where(there, _sum(stats, MOST, piece, there, pieces) + off, 0.0), 0)
            bound = HUGE
            k_f = 0.0
            k_r = 0.0
            mass_f = 1.0
            mass_r = 1.0
            if FWD:
                bound = tl.minimum(limit_f * LOG2E, HUGE)
                cross = _sum(stats, CROSS_F, piece, there, pieces)
                k_f = tl.sum(part_z * (cross + each_z * off), 0) * over_z + gap
            if REV:
                bound = tl.minimum(bound, limit_r * LOG2E)
                cross = _sum(stats, CROSS_R, piece, there, pieces)
                k_r = tl.sum(part_r * (cross - each_r * off), 0) * over_r - gap
            limited = (most + gap > bound) | (least + gap < -bound) | dead | dead_r
            if limited:  # seldom: a ratio beyond the limit, known only now; the row is read again
                k_f = 0.0
                k_r = 0.0
                mass_f = 0.0
                mass_r = 0.0
                for i in range(pieces):
                    column = i * TILE + tl.arange(0, TILE)
                    inside_row = column < classes
                    z = tl.load(z_row + column, mask=inside_row, other=float("-inf"))
                    r = tl.load(r_row + column, mask=inside_row, other=float("-inf"))
                    a = _shifted(z.to(tl.float32), top, unit) - level
                    b = _shifted(r.to(tl.float32), top_r, unit) - level_r
                    p = tl.exp2(a)
                    q = tl.exp2(b)
                    ratio, inside = _limited(p, a - b, limit_f * LOG2E)
                    k_f += tl.sum(p * ratio, 0)
                    mass_f += tl.sum(p * inside, 0)
                    ratio, inside = _limited(q, b - a, limit_r * LOG2E)
                    k_r += tl.sum(q * ratio, 0)
                    mass_r += tl.sum(q * inside, 0)
            if FWD:
                tl.store(coefs + K_F, k_f)
                tl.store(coefs + MASS_F, mass_f)
                tl.store(values + 1 * rows + row, k_f * LN2)
            if REV:
                tl.store(coefs + K_R, k_r)
                tl.store(coefs + MASS_R, mass_r)
                tl.store(values + 2 * rows + row, k_r * LN2)
            tl.store(coefs + LIMITED, tl.where(limited, 1.0, 0.0))


# Whether these are multiples of 16 is of no use: no kernel of its own for that.
@triton.jit(do_not_specialize=["rows", "pieces", "lag"])
def sweep_kernel(
    z_ptr, r_ptr, t_ptr, scale_ptr, values, gz_ptr, gr_ptr, gram_ptr, stats_ptr, coefs_ptr, sync,
    rows, classes, pieces, lag, z_stride, r_stride, gz_stride, gr_stride,
    slope, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
    KINDS: tl.constexpr, SCALED: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr,
    GRAM: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Sweep over all rows; what each argument is says `_launch.sweep`."""
    ENT: tl.constexpr = KINDS & 1  # noqa: N806  # known when compiled, as the others
    FWD: tl.constexpr = (KINDS >> 1) & 1  # noqa: N806
    REV: tl.constexpr = (KINDS >> 2) & 1  # noqa: N806
    JSD: tl.constexpr = (KINDS >> 3) & 1  # noqa: N806
    ZL: tl.constexpr = (KINDS >> 4) & 1  # noqa: N806
    CE: tl.constexpr = (KINDS >> 5) & 1  # noqa: N806
    COMPARES: tl.constexpr = FWD or REV or JSD  # noqa: N806
    SLOPES: tl.constexpr = GZ or GR or GRAM  # noqa: N806
    unit = slope * LOG2E
    arrived = sync + 1
    ready = arrived + rows
    arrived_mean = ready + rows
    ready_mean = arrived_mean + rows
    items = rows * pieces
    late = 0
    if JSD:
        late += lag
    behind = late
    if SLOPES:
        behind += lag
    columns = tl.arange(0, TILE)
    ticket = tl.atomic_add(sync, 1)
    while ticket < items + behind:
        following = ticket
        if ticket < items:
            row = ticket // pieces
            piece = ticket - row * pieces
            counts = True
            if SCALED:
                counts = tl.load(scale_ptr + row) != 0
            if counts:
                column = piece * TILE + columns
                there = column < classes
                z_row = z_ptr + row.to(tl.int64) * z_stride
                r_row = r_ptr + row.to(tl.int64) * r_stride
                z = tl.load(
                    z_row + column, mask=there, other=float("-inf"), eviction_policy="evict_last"
                ).to(tl.float32)
                if COMPARES:
                    r = tl.load(
                        r_row + column,
                        mask=there,
                        other=float("-inf"),
                        eviction_policy="evict_last",
                    ).to(tl.float32)
                following = tl.atomic_add(sync, 1)  # its way is that of the loads
                stats = stats_ptr + row.to(tl.int64) * (10 * pieces)
                top = tl.max(z, 0)
                x = _shifted(z, _finite(top), unit)
                e = tl.exp2(x)
                tl.store(stats + TOP_Z * pieces + piece, top)
                tl.store(stats + SUM_Z * pieces + piece, tl.sum(e, 0))
                if ENT:
                    tl.store(stats + MOMENT * pieces + piece, tl.sum(e * x, 0))
                if COMPARES:
                    top_r = tl.max(r, 0)
                    y = _shifted(r, _finite(top_r), unit)
                    f = tl.exp2(y)
                    tl.store(stats + TOP_R * pieces + piece, top_r)
                    tl.store(stats + SUM_R * pieces + piece, tl.sum(f, 0))
                    d = x - y
                    if FWD:
                        tl.store(stats + CROSS_F * pieces + piece, tl.sum(e * d, 0))
                    if REV:
                        tl.store(stats + CROSS_R * pieces + piece, -tl.sum(f * d, 0))
                    if FWD or REV:
                        tl.store(stats + LEAST * pieces + piece, tl.min(d, 0))
                        tl.store(stats + MOST * pieces + piece, tl.max(d, 0))
                tl.debug_barrier()  # every thread's stores before the release
                if tl.atomic_add(arrived + row, 1, sem="acq_rel") == pieces - 1:
                    _gather(
                        z_row, r_row, t_ptr + row, values, coefs_ptr + row * 12, stats, row, rows,
                        classes, pieces, slope, limit_f, limit_r,
                        COMPARES, ENT, FWD, REV, ZL, CE, TILE, PIECES,
                    )  # fmt: skip
                    tl.debug_barrier()
                    tl.atomic_add(ready + row, 1, sem="release")
            else:
                following = tl.atomic_add(sync, 1)
                if piece == 0:
                    for kind in tl.static_range(6):
                        tl.store(values + kind * rows + row, 0.0)
        else:
            following = tl.atomic_add(sync, 1)
        if JSD:
            item = ticket - lag
            if (item >= 0) & (item < items):
                row = item // pieces
                piece = item - row * pieces
                counts = True
                if SCALED:
                    counts = tl.load(scale_ptr + row) != 0
                if counts:
                    column = piece * TILE + columns
                    there = column < classes
                    z_row = z_ptr + row.to(tl.int64) * z_stride
                    r_row = r_ptr + row.to(tl.int64) * r_stride
                    z = tl.load(z_row + column, mask=there, other=float("-inf")).to(tl.float32)
                    r = tl.load(r_row + column, mask=there, other=float("-inf")).to(tl.float32)
                    _wait(ready + row)
                    coefs = coefs_ptr + row * 12
                    top = tl.load(coefs + Z_TOP, cache_modifier=".cg")
                    level = tl.load(coefs + Z_LEVEL, cache_modifier=".cg")
                    top_r = tl.load(coefs + R_TOP, cache_modifier=".cg")
                    level_r = tl.load(coefs + R_LEVEL, cache_modifier=".cg")
                    a = _shifted(z, top, unit) - level
                    b = _shifted(r, top_r, unit) - level_r
                    p = tl.exp2(a)
                    q = tl.exp2(b)
                    mean = tl.log2(tl.maximum(0.5 * (p + q), 1e-37))
                    stats = stats_ptr + row.to(tl.int64) * (10 * pieces)
                    tl.store(stats + LEAST * pieces + piece, tl.sum(p * (a - mean), 0))
                    tl.store(stats + MOST * pieces + piece, tl.sum(q * (b - mean), 0))
                    tl.debug_barrier()
                    if tl.atomic_add(arrived_mean + row, 1, sem="acq_rel") == pieces - 1:
                        each = tl.arange(0, PIECES)
                        k_p = tl.sum(_sum(stats, LEAST, each, each < pieces, pieces), 0)
                        k_q = tl.sum(_sum(stats, MOST, each, each < pieces, pieces), 0)
                        tl.store(coefs + K_P, k_p)
                        tl.store(coefs + K_Q, k_q)
                        js = 0.5 * (k_p + k_q) * LN2
                        js = tl.maximum(js, 0.0, propagate_nan=tl.PropagateNan.ALL)
                        tl.store(values + 3 * rows + row, js)
                        tl.debug_barrier()
                        tl.atomic_add(ready_mean + row, 1, sem="release")
        if SLOPES:
            item = ticket - behind
            if (item >= 0) & (item < items):
                row = item // pieces
                piece = item - row * pieces
                column = piece * TILE + columns
                there = column < classes
                share = 1.0
                if SCALED:
                    share = tl.load(scale_ptr + row)
                gz_row = gz_ptr + row.to(tl.int64) * gz_stride
                gr_row = gr_ptr + row.to(tl.int64) * gr_stride
                products = gram_ptr + item.to(tl.int64) * PAIRS
                if share != 0:
                    z_row = z_ptr + row.to(tl.int64) * z_stride
                    r_row = r_ptr + row.to(tl.int64) * r_stride
                    z = tl.load(
                        z_row + column,
                        mask=there,
                        other=float("-inf"),
                        eviction_policy="evict_first",
                    ).to(tl.float32)
                    if COMPARES:
                        r = tl.load(
                            r_row + column,
                            mask=there,
                            other=float("-inf"),
                            eviction_policy="evict_first",
                        ).to(tl.float32)
                    if JSD:
                        _wait(ready_mean + row)
                    else:
                        _wait(ready + row)
                    coefs = coefs_ptr + row * 12
                    top = tl.load(coefs + Z_TOP, cache_modifier=".cg")
                    level = tl.load(coefs + Z_LEVEL, cache_modifier=".cg")
                    a = _shifted(z, top, unit) - level
                    p = tl.exp2(a)
                    limited = False
                    if COMPARES:
                        top_r = tl.load(coefs + R_TOP, cache_modifier=".cg")
                        level_r = tl.load(coefs + R_LEVEL, cache_modifier=".cg")
                        b = _shifted(r, top_r, unit) - level_r
                        q = tl.exp2(b)
                        d = a - b
                        if FWD or REV:
                            limited = tl.load(coefs + LIMITED, cache_modifier=".cg") != 0
                    by_z = share * slope
                    if ENT:
                        h = tl.load(coefs + H, cache_modifier=".cg")
                    if FWD:
                        k_f = tl.load(coefs + K_F, cache_modifier=".cg")
                        mass_f = tl.load(coefs + MASS_F, cache_modifier=".cg")
                    if REV:
                        k_r = tl.load(coefs + K_R, cache_modifier=".cg")
                        mass_r = tl.load(coefs + MASS_R, cache_modifier=".cg")
                    if ZL:
                        whole = 2.0 * (top * slope + level * LN2)
                    if CE:
                        target = tl.load(t_ptr + row)
                    if JSD:
                        mean = tl.log2(tl.maximum(0.5 * (p + q), 1e-37))
                        k_p = tl.load(coefs + K_P, cache_modifier=".cg")
                        k_q = tl.load(coefs + K_Q, cache_modifier=".cg")
                    if GZ and not GRAM:
                        # p · (a row's constant + a few functions) + what is no multiple of p
                        base = 0.0
                        if ENT:
                            base -= w_ent * LN2 * h
                        if ZL:
                            base += w_z * whole
                        if CE:
                            base += w_ce
                        if JSD:
                            base -= 0.5 * w_js * LN2 * k_p
                        if not limited:
                            if FWD:
                                base -= w_fwd * LN2 * k_f
                            if REV:
                                base += w_rev
                        inner = tl.zeros([TILE], tl.float32) + by_z * base
                        if ENT:
                            inner -= (by_z * w_ent * LN2) * a
                        if JSD:
                            inner += (0.5 * by_z * w_js * LN2) * (a - mean)
                        if limited:
                            total = p * inner
                            if FWD:
                                ratio, inside = _limited(p, d, limit_f * LOG2E)
                                pull = (ratio - k_f) * LN2 + inside - mass_f
                                total += by_z * w_fwd * tl.where(p == 0, 0.0, p * pull)
                            if REV:
                                ratio, inside = _limited(q, -d, limit_r * LOG2E)
                                total += by_z * w_rev * (p * mass_r - q * inside)
                        else:
                            if FWD:
                                inner += (by_z * w_fwd * LN2) * d
                            total = p * inner
                            if REV:
                                total -= (by_z * w_rev) * q
                        if CE:
                            total = tl.where(column == target, total - by_z * w_ce, total)
                        tl.store(gz_row + column, total.to(gz_ptr.dtype.element_ty), mask=there)
                    if GRAM:
                        g_ent = p
                        g_fwd = p
                        g_rev = p
                        g_js = p
                        g_z = p
                        g_ce = p
                        if ENT:
                            g_ent = p * (a + h) * -LN2
                        if FWD:
                            if limited:
                                ratio, inside = _limited(p, d, limit_f * LOG2E)
                                pull = (ratio - k_f) * LN2 + inside - mass_f
                                g_fwd = tl.where(p == 0, 0.0, p * pull)
                            else:
                                g_fwd = p * (d - k_f) * LN2
                        if REV:
                            if limited:
                                ratio, inside = _limited(q, -d, limit_r * LOG2E)
                                g_rev = p * mass_r - q * inside
                            else:
                                g_rev = p - q
                        if JSD:
                            g_js = p * (a - mean - k_p) * (0.5 * LN2)
                        if ZL:
                            g_z = p * whole
                        if CE:
                            g_ce = tl.where(column == target, p - 1.0, p)
                        slopes = (g_ent, g_fwd, g_rev, g_js, g_z, g_ce)
                        weights = (w_ent, w_fwd, w_rev, w_js, w_z, w_ce)
                        if GZ:
                            total = tl.zeros([TILE], tl.float32)
                            for i in tl.static_range(6):
                                if (KINDS >> i) & 1:
                                    total += (by_z * weights[i]) * slopes[i]
                            tl.store(gz_row + column, total.to(gz_ptr.dtype.element_ty), mask=there)
                        n = 0
                        for i in tl.static_range(6):
                            for j in tl.static_range(i, 6):
                                if (KINDS >> i) & (KINDS >> j) & 1:
                                    product = tl.sum(slopes[i] * slopes[j], 0)
                                    tl.store(products + n, product * (slope * slope))
                                    n += 1
                    if GR:
                        total = tl.zeros([TILE], tl.float32)
                        if FWD:
                            if limited:
                                ratio, inside = _limited(p, d, limit_f * LOG2E)
                                total += w_fwd * (q * mass_f - p * inside)
                            else:
                                total += w_fwd * (q - p)
                        if REV:
                            if limited:
                                ratio, inside = _limited(q, -d, limit_r * LOG2E)
                                pull = (ratio - k_r) * LN2 + inside - mass_r
                                total += w_rev * tl.where(q == 0, 0.0, q * pull)
                            else:
                                total += (w_rev * LN2) * q * (-d - k_r)
                        if JSD:
                            total += (0.5 * w_js * LN2) * q * (b - mean - k_q)
                        total *= by_z
                        tl.store(gr_row + column, total.to(gr_ptr.dtype.element_ty), mask=there)
                else:
                    if GZ:
                        nothing = tl.zeros([TILE], gz_ptr.dtype.element_ty)
                        tl.store(gz_row + column, nothing, mask=there)
                    if GR:
                        nothing = tl.zeros([TILE], gr_ptr.dtype.element_ty)
                        tl.store(gr_row + column, nothing, mask=there)
                    if GRAM:
                        for i in tl.static_range(PAIRS):
                            tl.store(products + i, 0.0)
        ticket = following


@triton.jit
def scale_kernel(x_ptr, factor_ptr, size, TILE: tl.constexpr):
    """Multiply in place, unless by 1: then nothing else is read."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        x = tl.load(x_ptr + at, mask=at < size)
        scaled = x.to(tl.float32) * factor
        tl.store(x_ptr + at, scaled.to(x_ptr.dtype.element_ty), mask=at < size)
