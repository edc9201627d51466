"""The Triton kernels: every component of a row in two visits, the second one served by the L2.

A row is cut into pieces; a work item is one piece. Programs draw tickets in order. Ticket t
stands for the statistics of item t, then the gradient of item t - lag (with JS, in between, the
divergences from the mean, and 2 lag): by then the row's statistics are complete, as a rule, and
the piece is still in the L2. Whoever has the last piece of a row combines them, in the order of
the pieces: the numbers do not depend on the schedule. An item waits only for items of lower
tickets, which running programs hold, so that any number of programs comes to an end, even one.

There are no barriers and no fences: a number that another program waits for is its own flag,
UNSET until it is written. A program is one warp, so that one computes while another waits; each
thread sums up its own share of a piece, and only the sums go through the warp.

Logarithms are to the base 2 inside, and relative to the row's largest logit, in float32.
"""

# what is known when compiled is written in capitals
import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

LOG_ZERO = tl.constexpr(-1e30)  # stands for log 0, as in `divergences`
HUGE = tl.constexpr(1e29)
TINY = tl.constexpr(1e-37)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
FEW = tl.constexpr(256)  # classes at a time where it is seldom and registers are scarce
FULL = tl.constexpr(1e30)  # a sum in float32 may well become as large
UNSET = tl.constexpr(-1)  # as an integer; no number that is computed has these bits

# A row's coefficients, by place.
Z_TOP, Z_LEVEL, R_TOP, R_LEVEL, H, K_F, MASS_F, K_R, MASS_R, BEYOND, K_P, K_Q = (
    tl.constexpr(i) for i in range(12)
)
COEFFICIENTS = tl.constexpr(12)


@triton.jit
def _log2(x):
    """Fast, where libdevice's takes 25 instructions: it is needed for every class of JS."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _logs(x, unit, top):
    """Logits to the base 2 relative to `top`, at least LOG_ZERO; NaN stays."""
    return tl.maximum(tl.fma(x, unit, -top), LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _limited(p, d, limit):
    """What the limit leaves of a log ratio, and where it passes a gradient."""
    ratio = tl.where(d > HUGE, float("inf"), d)  # log 0 on the other side
    ratio = tl.minimum(tl.maximum(ratio, -limit), limit)
    inside = tl.where(tl.abs(d) <= limit, 1.0, 0.0)
    return tl.where(p == 0, 0.0, ratio), inside


@triton.jit
def _publish(place, x):
    bits = x.to(tl.int32, bitcast=True)
    tl.store(place, tl.where(bits == UNSET, 0x7FC00000, bits))  # a NaN of just those bits


@triton.jit
def _settled(place, bits):
    """The number at `place`, once it is there; `bits` is a first look."""
    while bits == UNSET:
        bits = tl.load(place, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _glance(place, there):
    return tl.load(place, mask=there, other=0, volatile=True)


@triton.jit
def _all_settled(place, there, bits):
    while tl.min(tl.abs(bits - UNSET), 0) == 0:
        bits = tl.load(place, mask=there, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tops(place, there, bits):
    """The largest logit of a row, of its pieces, and the pieces' shares of 2 ** logit."""
    tops = _all_settled(place, there, bits)
    tops = tl.where(there, tops, float("-inf"))
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    off = tl.where(tops == float("-inf"), 0.0, tops - top)
    return top, off, tl.where(tops == float("-inf"), 0.0, tl.exp2(off))


@triton.jit
def _level(part, sums):
    total = tl.sum(part * sums, 0)
    dead = total == 0
    total = tl.where(dead, 1.0, total)
    return tl.log2(total), 1.0 / total, dead


@triton.jit
def _columns(VECTOR: tl.constexpr):
    """The classes of a tile's first half: VECTOR in a row for each thread; `_both` gives all."""
    return tl.arange(0, 32)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def _both(first, VECTOR: tl.constexpr):
    return tl.join(first, first + 32 * VECTOR)


@triton.jit
def _load(row, start, bound, VECTOR: tl.constexpr, PACKED: tl.constexpr, POLICY: tl.constexpr):
    """A tile as it is in memory; narrow floats two to a word, to take few registers."""
    if PACKED:
        words = row.to(tl.pointer_type(tl.int32), bitcast=True) + start // 2
        half: tl.constexpr = VECTOR // 2
        at = _columns(half)
        # Two times -inf, of either kind.
        nothing = -8323200 if row.dtype.element_ty == tl.bfloat16 else -67044352
        left = (bound - start) // 2
        a = tl.load(words + at, mask=at < left, other=nothing, eviction_policy=POLICY)
        at += 32 * half
        b = tl.load(words + at, mask=at < left, other=nothing, eviction_policy=POLICY)
    else:
        at = start + _columns(VECTOR)
        a = tl.load(row + at, mask=at < bound, other=float("-inf"), eviction_policy=POLICY)
        at += 32 * VECTOR
        b = tl.load(row + at, mask=at < bound, other=float("-inf"), eviction_policy=POLICY)
    return tl.join(a, b)


@triton.jit
def _word(word, KIND: tl.constexpr, VECTOR: tl.constexpr):
    if KIND == tl.bfloat16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(low, high), [32, VECTOR])


@triton.jit
def _floats(raw, KIND: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr):
    if PACKED:
        a, b = tl.split(raw)
        tile = tl.join(_word(a, KIND, VECTOR), _word(b, KIND, VECTOR))
    else:
        tile = raw.to(tl.float32)
    return tile


@triton.jit
def _store(row, start, x, bound, VECTOR: tl.constexpr):
    a, b = tl.split(x.to(row.dtype.element_ty))
    at = start + _columns(VECTOR)
    tl.store(row + at, a, mask=at < bound)
    at += 32 * VECTOR
    tl.store(row + at, b, mask=at < bound)


@triton.jit
def _by_thread(x):
    """Each thread's sum over a tile."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def _most_by_thread(x):
    return tl.max(tl.max(x, 2), 1)


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
def _statistics(
    z_row, r_row, piece, tiles, classes, unit, stats, pieces, KINDS: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr,
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
    z = _load(z_row, start, bound, VECTOR, PACKED, "evict_last")
    z_next = _load(z_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    r = z
    r_next = z
    if COMPARES:
        r = _load(r_row, start, bound, VECTOR, PACKED, "evict_last")
        r_next = _load(r_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    top = tl.max(_most_by_thread(_floats(z, z_type, VECTOR, PACKED)), 0) * unit
    top_r = 0.0
    if COMPARES:
        top_r = tl.max(_most_by_thread(_floats(r, r_type, VECTOR, PACKED)), 0) * unit
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
        for i in range(tiles):
            z_last = _load(z_row, start + (i + 2) * TILE, bound, VECTOR, PACKED, "evict_last")
            r_last = z_last
            if COMPARES:
                r_last = _load(r_row, start + (i + 2) * TILE, bound, VECTOR, PACKED, "evict_last")
            x = _logs(_floats(z, z_type, VECTOR, PACKED), unit, base)
            e = tl.exp2(x)
            sum_e += _by_thread(e)
            if ENT:
                sum_ex += _by_thread(e * x)
            if COMPARES:
                y = _logs(_floats(r, r_type, VECTOR, PACKED), unit, base_r)
                f = tl.exp2(y)
                sum_f += _by_thread(f)
                d = x - y
                if FWD:
                    sum_ed += _by_thread(e * d)
                if REV:
                    sum_fd += _by_thread(f * d)
                if FWD or REV:
                    max_d = tl.maximum(max_d, _most_by_thread(tl.abs(d)))
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
            z = _load(z_row, start, bound, VECTOR, PACKED, "evict_last")
            z_next = _load(z_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
            if COMPARES:
                top_r = _largest(r_row, start, bound, unit)
                r = _load(r_row, start, bound, VECTOR, PACKED, "evict_last")
                r_next = _load(r_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    _publish(stats + piece, top)
    _publish(stats + pieces + piece, total)
    slot = stats + 2 * pieces + piece
    if ENT:
        _publish(slot, moment)
        slot += pieces
    if COMPARES:
        _publish(slot, top_r)
        _publish(slot + pieces, total_r)
        slot += 2 * pieces
    if FWD:
        _publish(slot, cross_f)
        slot += pieces
    if REV:
        _publish(slot, cross_r)
        slot += pieces
    if FWD or REV:
        _publish(slot, most)


@triton.jit
def _combine(
    z_row, r_row, t_row, values, coefs, stats, rows, classes, pieces, share, unit,
    w_ent, w_fwd, w_rev, w_z, w_ce, limit_f, limit_r, KINDS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """All pieces of a row: its values, and the coefficients of its gradients."""
    ENT: tl.constexpr = KINDS & 1
    FWD: tl.constexpr = (KINDS >> 1) & 1
    REV: tl.constexpr = (KINDS >> 2) & 1
    JSD: tl.constexpr = (KINDS >> 3) & 1
    ZL: tl.constexpr = (KINDS >> 4) & 1
    CE: tl.constexpr = (KINDS >> 5) & 1
    COMPARES: tl.constexpr = (KINDS & 14) != 0
    all_terms = 0.0
    piece = tl.arange(0, PIECES)
    there = piece < pieces
    slot = stats + piece
    # A first look at everything, at once; then it is waited for one by one.
    tops_bits = _glance(slot, there)
    sums_bits = _glance(slot + pieces, there)
    place = slot + 2 * pieces
    if ENT:
        moment_bits = _glance(place, there)
        place_moment = place
        place += pieces
    if COMPARES:
        tops_r_bits = _glance(place, there)
        sums_r_bits = _glance(place + pieces, there)
        place_r = place
        place += 2 * pieces
    if FWD:
        cross_f_bits = _glance(place, there)
        place_f = place
        place += pieces
    if REV:
        cross_r_bits = _glance(place, there)
        place_rev = place
        place += pieces
    if FWD or REV:
        most_bits = _glance(place, there)
    top, off, part = _tops(slot, there, tops_bits)
    sums = _all_settled(slot + pieces, there, sums_bits)
    level, over, dead = _level(part, sums)
    _publish(coefs + Z_TOP, top)
    _publish(coefs + Z_LEVEL, level)
    if ENT:
        moment = _all_settled(place_moment, there, moment_bits)
        h = level - tl.sum(part * (moment + sums * off), 0) * over
        _publish(coefs + H, h)
        all_terms += w_ent * h * LN2
        tl.store(values, share * h * LN2)
        values += rows
    if COMPARES:
        top_r, off_r, part_r = _tops(place_r, there, tops_r_bits)
        sums_r = _all_settled(place_r + pieces, there, sums_r_bits)
        level_r, over_r, dead_r = _level(part_r, sums_r)
        _publish(coefs + R_TOP, top_r)
        _publish(coefs + R_LEVEL, level_r)
    if FWD or REV:
        off -= off_r
        gap = level_r - level
        most = _all_settled(place, there, most_bits)
        most = tl.max(tl.where(there, most + tl.abs(off), 0.0), 0) + tl.abs(gap)
        bound = HUGE
        k_f = 0.0
        k_r = 0.0
        mass_f = 1.0
        mass_r = 1.0
        if FWD:
            bound = tl.minimum(limit_f * LOG2E, HUGE)
            cross = _all_settled(place_f, there, cross_f_bits)
            k_f = tl.sum(part * (cross + sums * off), 0) * over + gap
        if REV:
            bound = tl.minimum(limit_r * LOG2E, bound)
            cross = _all_settled(place_rev, there, cross_r_bits)
            k_r = tl.sum(part_r * (cross - sums_r * off), 0) * over_r - gap
        limited = (most > bound) | dead | dead_r
        if limited:  # seldom: a ratio may be beyond the limit, and the row is read again
            k_f = 0.0
            k_r = 0.0
            mass_f = 0.0
            mass_r = 0.0
            for i in range(0, classes, FEW):
                column = i + tl.arange(0, FEW)
                z = tl.load(z_row + column, mask=column < classes, other=float("-inf"))
                r = tl.load(r_row + column, mask=column < classes, other=float("-inf"))
                a = _logs(z.to(tl.float32), unit, top) - level
                b = _logs(r.to(tl.float32), unit, top_r) - level_r
                p = tl.exp2(a)
                q = tl.exp2(b)
                ratio, inside = _limited(p, a - b, limit_f * LOG2E)
                k_f += tl.sum(p * ratio, 0)
                mass_f += tl.sum(p * inside, 0)
                ratio, inside = _limited(q, b - a, limit_r * LOG2E)
                k_r += tl.sum(q * ratio, 0)
                mass_r += tl.sum(q * inside, 0)
        if FWD:
            _publish(coefs + K_F, k_f)
            _publish(coefs + MASS_F, mass_f)
            all_terms += w_fwd * k_f * LN2
            tl.store(values, share * k_f * LN2)
            values += rows
        if REV:
            _publish(coefs + K_R, k_r)
            _publish(coefs + MASS_R, mass_r)
            all_terms += w_rev * k_r * LN2
            tl.store(values, share * k_r * LN2)
            values += rows
        _publish(coefs + BEYOND, tl.where(limited, 1.0, 0.0))
    if JSD:
        values += rows  # its value and its part of the total are known later
    if ZL:
        whole = tl.where(dead, float("inf"), (top + level) * LN2)
        all_terms += w_z * whole * whole
        tl.store(values, share * whole * whole)
        values += rows
    if CE:
        target = tl.load(t_row)
        known = (target >= 0) & (target < classes)
        hit = tl.load(z_row + target, mask=known, other=float("nan")).to(tl.float32)
        loss = (level - tl.fma(hit, unit, -top)) * LN2
        all_terms += w_ce * loss
        tl.store(values, share * loss)
        values += rows
    tl.store(values, share * all_terms)


@triton.jit
def _means(
    z_row, r_row, value, total, coefs, sums, piece, tiles, classes, pieces, share, unit, w_js,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One piece of JS: Σ p · log(p / m) and Σ q · log(q / m); the last one adds them up."""
    TILE: tl.constexpr = 64 * VECTOR
    start = piece * (tiles * TILE)
    bound = tl.minimum(start + tiles * TILE, classes)
    z_type: tl.constexpr = z_row.dtype.element_ty
    r_type: tl.constexpr = r_row.dtype.element_ty
    z = _load(z_row, start, bound, VECTOR, PACKED, "evict_last")
    r = _load(r_row, start, bound, VECTOR, PACKED, "evict_last")
    z_next = _load(z_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    r_next = _load(r_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    bits = tl.load(coefs + Z_TOP, volatile=True)
    bits_level = tl.load(coefs + Z_LEVEL, volatile=True)
    bits_r = tl.load(coefs + R_TOP, volatile=True)
    bits_level_r = tl.load(coefs + R_LEVEL, volatile=True)
    top = _settled(coefs + Z_TOP, bits)
    level = _settled(coefs + Z_LEVEL, bits_level)
    top_r = _settled(coefs + R_TOP, bits_r)
    level_r = _settled(coefs + R_LEVEL, bits_level_r)
    of_p = tl.zeros([32], tl.float32)
    of_q = tl.zeros([32], tl.float32)
    for i in range(tiles):
        z_last = _load(z_row, start + (i + 2) * TILE, bound, VECTOR, PACKED, "evict_last")
        r_last = _load(r_row, start + (i + 2) * TILE, bound, VECTOR, PACKED, "evict_last")
        a = _logs(_floats(z, z_type, VECTOR, PACKED), unit, top) - level
        b = _logs(_floats(r, r_type, VECTOR, PACKED), unit, top_r) - level_r
        p = tl.exp2(a)
        q = tl.exp2(b)
        mean = _log2(tl.maximum(0.5 * (p + q), TINY))
        of_p += _by_thread(p * (a - mean))
        of_q += _by_thread(q * (b - mean))
        z = z_next
        r = r_next
        z_next = z_last
        r_next = r_last
    _publish(sums + piece, tl.sum(of_p, 0))
    _publish(sums + pieces + piece, tl.sum(of_q, 0))
    if piece == pieces - 1:
        each = sums + tl.arange(0, PIECES)
        own = tl.arange(0, PIECES) < pieces
        bits_p = _glance(each, own)
        bits_q = _glance(each + pieces, own)
        k_p = tl.sum(_all_settled(each, own, bits_p), 0)
        k_q = tl.sum(_all_settled(each + pieces, own, bits_q), 0)
        _publish(coefs + K_P, k_p)
        _publish(coefs + K_Q, k_q)
        js = tl.maximum(0.5 * (k_p + k_q) * LN2, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(value, share * js)
        tl.store(total, share * w_js * js)


@triton.jit
def _separate(
    p, q, a, d, mean, hit, h, k_f, mass_f, mass_r, k_p, whole, limit_f, limit_r,
    KINDS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Each component's gradient for itself, times the temperature."""
    g_ent = p
    g_fwd = p
    g_rev = p
    g_js = p
    g_z = p
    g_ce = p
    if KINDS & 1:
        g_ent = p * (a + h) * -LN2
    if (KINDS >> 1) & 1:
        if LIMITED:
            ratio, inside = _limited(p, d, limit_f * LOG2E)
            g_fwd = tl.where(p == 0, 0.0, p * ((ratio - k_f) * LN2 + inside - mass_f))
        else:
            g_fwd = p * (d - k_f) * LN2
    if (KINDS >> 2) & 1:
        if LIMITED:
            ratio, inside = _limited(q, -d, limit_r * LOG2E)
            g_rev = p * mass_r - q * inside
        else:
            g_rev = p - q
    if (KINDS >> 3) & 1:
        g_js = p * (a - mean - k_p) * (0.5 * LN2)
    if (KINDS >> 4) & 1:
        g_z = p * whole
    if (KINDS >> 5) & 1:
        g_ce = tl.where(hit, p - 1.0, p)
    return g_ent, g_fwd, g_rev, g_js, g_z, g_ce


@triton.jit
def _product(so_far, a, b, both: tl.constexpr):
    if both:
        return so_far + _by_thread(a * b)
    return so_far


@triton.jit
def _added(s, g, KINDS: tl.constexpr):
    """Each thread's inner products so far, with those of one more tile: 6 · 7 / 2 pairs."""
    E: tl.constexpr = KINDS & 1
    F: tl.constexpr = (KINDS >> 1) & 1
    R: tl.constexpr = (KINDS >> 2) & 1
    J: tl.constexpr = (KINDS >> 3) & 1
    Z: tl.constexpr = (KINDS >> 4) & 1
    C: tl.constexpr = (KINDS >> 5) & 1
    return (
        _product(s[0], g[0], g[0], E), _product(s[1], g[0], g[1], E & F),
        _product(s[2], g[0], g[2], E & R), _product(s[3], g[0], g[3], E & J),
        _product(s[4], g[0], g[4], E & Z), _product(s[5], g[0], g[5], E & C),
        _product(s[6], g[1], g[1], F), _product(s[7], g[1], g[2], F & R),
        _product(s[8], g[1], g[3], F & J), _product(s[9], g[1], g[4], F & Z),
        _product(s[10], g[1], g[5], F & C), _product(s[11], g[2], g[2], R),
        _product(s[12], g[2], g[3], R & J), _product(s[13], g[2], g[4], R & Z),
        _product(s[14], g[2], g[5], R & C), _product(s[15], g[3], g[3], J),
        _product(s[16], g[3], g[4], J & Z), _product(s[17], g[3], g[5], J & C),
        _product(s[18], g[4], g[4], Z), _product(s[19], g[4], g[5], Z & C),
        _product(s[20], g[5], g[5], C),
    )  # fmt: skip


@triton.jit
def _tiles(
    z, r, z_next, r_next, z_row, r_row, gz_row, gr_row, products, start, tiles, classes, target,
    by, slope, unit, constant, top, level, top_r, level_r, h, k_f, mass_f, k_r, mass_r, k_p, k_q,
    whole, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
    KINDS: tl.constexpr, LIMITED: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr,
    GRAM: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients of some tiles, once all of the row's coefficients are known."""
    ENT: tl.constexpr = KINDS & 1
    FWD: tl.constexpr = (KINDS >> 1) & 1
    REV: tl.constexpr = (KINDS >> 2) & 1
    JSD: tl.constexpr = (KINDS >> 3) & 1
    CE: tl.constexpr = (KINDS >> 5) & 1
    COMPARES: tl.constexpr = (KINDS & 14) != 0
    TILE: tl.constexpr = 64 * VECTOR
    nothing = tl.zeros([32], tl.float32)
    sums = (
        nothing, nothing, nothing, nothing, nothing, nothing, nothing,
        nothing, nothing, nothing, nothing, nothing, nothing, nothing,
        nothing, nothing, nothing, nothing, nothing, nothing, nothing,
    )  # fmt: skip
    bound = tl.minimum(start + tiles * TILE, classes)
    z_type: tl.constexpr = z_row.dtype.element_ty
    r_type: tl.constexpr = r_row.dtype.element_ty
    for i in range(tiles):
        here = start + i * TILE
        z_last = _load(z_row, here + 2 * TILE, bound, VECTOR, PACKED, "evict_first")
        r_last = z_last
        if COMPARES:
            r_last = _load(r_row, here + 2 * TILE, bound, VECTOR, PACKED, "evict_first")
        a = _logs(_floats(z, z_type, VECTOR, PACKED), unit, top) - level
        p = tl.exp2(a)
        if COMPARES:
            b = _logs(_floats(r, r_type, VECTOR, PACKED), unit, top_r) - level_r
            q = tl.exp2(b)
            d = a - b
        if JSD:
            mean = _log2(tl.maximum(0.5 * (p + q), TINY))
        if GRAM or LIMITED:
            slopes = _separate(
                p, q if COMPARES else p, a, d if COMPARES else p, mean if JSD else p,
                _both(here + _columns(VECTOR), VECTOR) == target, h, k_f, mass_f, mass_r, k_p,
                whole, limit_f, limit_r, KINDS, LIMITED,
            )  # fmt: skip
            if GZ:
                weights = (w_ent, w_fwd, w_rev, w_js, w_z, w_ce)
                total = tl.zeros_like(p)
                for k in tl.static_range(6):
                    if (KINDS >> k) & 1:
                        total = tl.fma(slopes[k], by * weights[k], total)
                _store(gz_row, here, total, bound, VECTOR)
            if GRAM:
                sums = _added(sums, slopes, KINDS)
        elif GZ:
            inner = tl.zeros_like(p) + constant
            if ENT:
                inner = tl.fma(a, -by * w_ent * LN2, inner)
            if JSD:
                inner = tl.fma(a - mean, 0.5 * by * w_js * LN2, inner)
            if FWD:
                inner = tl.fma(d, by * w_fwd * LN2, inner)
            total = p * inner
            if REV:
                total = tl.fma(q, -by * w_rev, total)
            if CE:
                if (target >= here) & (target < here + TILE):
                    hit = _both(here + _columns(VECTOR), VECTOR) == target
                    total = tl.where(hit, total - by * w_ce, total)
            _store(gz_row, here, total, bound, VECTOR)
        if GR:
            pull_r = tl.zeros_like(p)
            if FWD:
                if LIMITED:
                    ratio, inside = _limited(p, d, limit_f * LOG2E)
                    pull_r += w_fwd * (q * mass_f - p * inside)
                else:
                    pull_r += w_fwd * (q - p)
            if REV:
                if LIMITED:
                    ratio, inside = _limited(q, -d, limit_r * LOG2E)
                    pull = (ratio - k_r) * LN2 + inside - mass_r
                    pull_r += w_rev * tl.where(q == 0, 0.0, q * pull)
                else:
                    pull_r += (w_rev * LN2) * q * (-d - k_r)
            if JSD:
                pull_r += (0.5 * w_js * LN2) * q * (b - mean - k_q)
            _store(gr_row, here, by * pull_r, bound, VECTOR)
        z = z_next
        r = r_next
        z_next = z_last
        r_next = r_last
    if GRAM:
        n = 0
        for i in tl.static_range(6):
            for j in tl.static_range(i, 6):
                if (KINDS >> i) & (KINDS >> j) & 1:
                    product = tl.sum(sums[i * (11 - i) // 2 + j], 0)
                    tl.store(products + n, product * (slope * slope))
                    n += 1


@triton.jit
def _slopes(
    z_row, r_row, t_row, gz_row, gr_row, products, coefs, piece, tiles, classes, share, slope, unit,
    w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
    KINDS: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr, GRAM: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One piece of the gradients."""
    TILE: tl.constexpr = 64 * VECTOR
    ENT: tl.constexpr = KINDS & 1
    FWD: tl.constexpr = (KINDS >> 1) & 1
    REV: tl.constexpr = (KINDS >> 2) & 1
    JSD: tl.constexpr = (KINDS >> 3) & 1
    ZL: tl.constexpr = (KINDS >> 4) & 1
    CE: tl.constexpr = (KINDS >> 5) & 1
    COMPARES: tl.constexpr = (KINDS & 14) != 0
    start = piece * (tiles * TILE)
    bound = tl.minimum(start + tiles * TILE, classes)
    z = _load(z_row, start, bound, VECTOR, PACKED, "evict_first")
    z_next = _load(z_row, start + TILE, bound, VECTOR, PACKED, "evict_first")
    r = z
    r_next = z
    if COMPARES:
        r = _load(r_row, start, bound, VECTOR, PACKED, "evict_first")
        r_next = _load(r_row, start + TILE, bound, VECTOR, PACKED, "evict_first")
    # A first look at everything, at once; then it is waited for one by one.
    top_bits = tl.load(coefs + Z_TOP, volatile=True)
    level_bits = tl.load(coefs + Z_LEVEL, volatile=True)
    h_bits = 0
    top_r_bits = 0
    level_r_bits = 0
    k_f_bits = 0
    mass_f_bits = 0
    k_r_bits = 0
    mass_r_bits = 0
    limited_bits = 0
    k_p_bits = 0
    k_q_bits = 0
    if ENT:
        h_bits = tl.load(coefs + H, volatile=True)
    if COMPARES:
        top_r_bits = tl.load(coefs + R_TOP, volatile=True)
        level_r_bits = tl.load(coefs + R_LEVEL, volatile=True)
    if FWD:
        k_f_bits = tl.load(coefs + K_F, volatile=True)
        mass_f_bits = tl.load(coefs + MASS_F, volatile=True)
    if REV:
        k_r_bits = tl.load(coefs + K_R, volatile=True)
        mass_r_bits = tl.load(coefs + MASS_R, volatile=True)
    if FWD or REV:
        limited_bits = tl.load(coefs + BEYOND, volatile=True)
    if JSD:
        k_p_bits = tl.load(coefs + K_P, volatile=True)
        k_q_bits = tl.load(coefs + K_Q, volatile=True)
    target = -1
    if CE:
        target = tl.load(t_row).to(tl.int32)
    top = _settled(coefs + Z_TOP, top_bits)
    level = _settled(coefs + Z_LEVEL, level_bits)
    h = 0.0
    top_r = 0.0
    level_r = 0.0
    k_f = 0.0
    mass_f = 0.0
    k_r = 0.0
    mass_r = 0.0
    k_p = 0.0
    k_q = 0.0
    limited = False
    if ENT:
        h = _settled(coefs + H, h_bits)
    if COMPARES:
        top_r = _settled(coefs + R_TOP, top_r_bits)
        level_r = _settled(coefs + R_LEVEL, level_r_bits)
    if FWD:
        k_f = _settled(coefs + K_F, k_f_bits)
        mass_f = _settled(coefs + MASS_F, mass_f_bits)
    if REV:
        k_r = _settled(coefs + K_R, k_r_bits)
        mass_r = _settled(coefs + MASS_R, mass_r_bits)
    if FWD or REV:
        limited = _settled(coefs + BEYOND, limited_bits) != 0
    if JSD:
        k_p = _settled(coefs + K_P, k_p_bits)
        k_q = _settled(coefs + K_Q, k_q_bits)
    whole = 2.0 * (top + level) * LN2  # of the z-loss: 2 logsumexp
    by = share * slope
    # The gradient is p · (a row's constant + a few functions) + what is no multiple of p.
    constant = 0.0
    if ENT:
        constant -= w_ent * LN2 * h
    if ZL:
        constant += w_z * whole
    if CE:
        constant += w_ce
    if JSD:
        constant -= 0.5 * w_js * LN2 * k_p
    if FWD:
        constant -= w_fwd * LN2 * k_f
    if REV:
        constant += w_rev
    constant *= by
    if limited:  # seldom
        _tiles(
            _load(z_row, start, bound, FEW // 64, False, "evict_first"),
            _load(r_row, start, bound, FEW // 64, False, "evict_first"),
            _load(z_row, start + FEW, bound, FEW // 64, False, "evict_first"),
            _load(r_row, start + FEW, bound, FEW // 64, False, "evict_first"),
            z_row, r_row, gz_row, gr_row, products, start, tiles * (TILE // FEW),
            classes, target, by, slope, unit, constant, top, level, top_r, level_r, h, k_f, mass_f,
            k_r, mass_r, k_p, k_q, whole, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
            KINDS, True, GZ, GR, GRAM, FEW // 64, False,
        )  # fmt: skip
    else:
        _tiles(
            z, r, z_next, r_next, z_row, r_row, gz_row, gr_row, products, start, tiles,
            classes, target, by, slope, unit, constant, top, level, top_r, level_r, h, k_f, mass_f,
            k_r, mass_r, k_p, k_q, whole, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
            KINDS, False, GZ, GR, GRAM, VECTOR, PACKED,
        )  # fmt: skip


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
        # By the first thread alone, and looked at only at the end: the others do not wait for it.
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
                _statistics(
                    z_row, r_row, piece, tiles, classes, unit, stats, pieces, KINDS, VECTOR, PACKED
                )
                if piece == pieces - 1:
                    _combine(
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
                    _means(
                        z_ptr + row.to(tl.int64) * z_stride, r_ptr + row.to(tl.int64) * r_stride,
                        values + BEFORE * rows + row, values + (COUNT + 1) * rows + row,
                        coefs_ptr + row * COEFFICIENTS, sums, item - row * pieces, tiles, classes,
                        pieces, share, unit, w_js, VECTOR, PACKED, PIECES,
                    )  # fmt: skip
        if SLOPES:
            item = ticket - behind
            if (item >= 0) & (item < items):
                row = item // pieces
                piece = item - row * pieces
                gz_row = gz_ptr + row.to(tl.int64) * gz_stride
                gr_row = gr_ptr + row.to(tl.int64) * gr_stride
                products = gram_ptr + item.to(tl.int64) * PAIRS
                share = 1.0
                if SCALED:
                    share = tl.load(scale_ptr + row)
                if share != 0:
                    _slopes(
                        z_ptr + row.to(tl.int64) * z_stride, r_ptr + row.to(tl.int64) * r_stride,
                        t_ptr + row, gz_row, gr_row, products, coefs_ptr + row * COEFFICIENTS,
                        piece, tiles, classes, share, slope, unit,
                        w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
                        KINDS, GZ, GR, GRAM, VECTOR, PACKED,
                    )  # fmt: skip
                else:
                    for i in range(tiles):
                        here = (piece * tiles + i) * (64 * VECTOR)
                        nothing = tl.zeros([32, VECTOR, 2], tl.float32)
                        if GZ:
                            _store(gz_row, here, nothing, classes, VECTOR)
                        if GR:
                            _store(gr_row, here, nothing, classes, VECTOR)
                    if GRAM:
                        for i in tl.static_range(PAIRS):
                            tl.store(products + i, 0.0)
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
