"""The second visit to a piece: the gradients, and their inner products."""

import triton
import triton.language as tl

from steelyard.penalties.from_logits._kernel_signals import (
    BEYOND,
    K_F,
    K_P,
    K_Q,
    K_R,
    MASS_F,
    MASS_R,
    R_LEVEL,
    R_TOP,
    Z_LEVEL,
    Z_TOP,
    H,
    settled,
)
from steelyard.penalties.from_logits._kernel_statistics import (
    FEW,
)
from steelyard.penalties.from_logits._kernel_tiles import (
    LN2,
    LOG2E,
    TINY,
    columns_of,
    dot_by_thread,
    floats,
    halves,
    load_tile,
    log2,
    logs,
    offsets,
    store_tile,
    within,
)


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
            ratio, inside = within(p, d, limit_f * LOG2E)
            g_fwd = tl.where(p == 0, 0.0, p * ((ratio - k_f) * LN2 + inside - mass_f))
        else:
            g_fwd = p * (d - k_f) * LN2
    if (KINDS >> 2) & 1:
        if LIMITED:
            ratio, inside = within(q, -d, limit_r * LOG2E)
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
        return dot_by_thread(so_far, a, b)
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
    z, r, z_next, r_next, z_row, r_row, gz_row, gr_row, products, items, start, tiles, classes,
    target, by, unit, constant, top, level, top_r, level_r, h, k_f, mass_f, k_r, mass_r, k_p, k_q,
    whole, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
    KINDS: tl.constexpr, LIMITED: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr,
    GRAM: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The gradients of some tiles, once all of the row's coefficients are known."""
    ENT: tl.constexpr = KINDS & 1
    FWD: tl.constexpr = (KINDS >> 1) & 1
    REV: tl.constexpr = (KINDS >> 2) & 1
    JSD: tl.constexpr = (KINDS >> 3) & 1
    CE: tl.constexpr = (KINDS >> 5) & 1
    COMPARES: tl.constexpr = (KINDS & 14) != 0
    TILE: tl.constexpr = 64 * VECTOR
    # Where nothing needs p and q themselves, the row's sums go into the few coefficients.
    PLAIN: tl.constexpr = not (GRAM or LIMITED or GR)
    nothing = tl.zeros([32], tl.float32)
    sums = (
        nothing, nothing, nothing, nothing, nothing, nothing, nothing,
        nothing, nothing, nothing, nothing, nothing, nothing, nothing,
        nothing, nothing, nothing, nothing, nothing, nothing, nothing,
    )  # fmt: skip
    bound = tl.minimum(start + tiles * TILE, classes)
    z_type: tl.constexpr = z_row.dtype.element_ty
    r_type: tl.constexpr = r_row.dtype.element_ty
    by_a = -by * w_ent * LN2
    by_d = by * w_fwd * LN2
    by_q = -by * w_rev
    by_mean = 0.5 * by * w_js * LN2
    apart = level_r - level
    half = 0.5
    if PLAIN:
        # With p and q times 2 ** level; without JS q is taken as it comes.
        over = tl.exp2(-level)
        constant -= by_a * level
        by_q *= over
        if not JSD:
            constant += by_d * apart
            by_q *= tl.exp2(-apart)
        constant *= over
        by_a *= over
        by_d *= over
        by_mean *= over
    else:
        half *= tl.exp2(level)
    for first in range(0, tiles, UNROLL):
        for second in tl.static_range(UNROLL):
            here = start + (first + second) * TILE
            z_last = load_tile(z_row, here + 2 * TILE, bound, VECTOR, PACKED, "evict_first")
            r_last = z_last
            if COMPARES:
                r_last = load_tile(r_row, here + 2 * TILE, bound, VECTOR, PACKED, "evict_first")
            a = floats(z, z_type, VECTOR, PACKED)
            if not PLAIN:
                a = logs(a, unit, top) - level
            elif ENT or FWD or JSD:
                a = logs(a, unit, top)
            else:
                a = offsets(a, unit, top)
            p = tl.exp2(a)
            if COMPARES:
                b = floats(r, r_type, VECTOR, PACKED)
                if not PLAIN:
                    b = logs(b, unit, top_r) - level_r
                elif JSD:
                    b = logs(b, unit, top_r) - apart
                elif FWD:
                    b = logs(b, unit, top_r)
                else:
                    b = offsets(b, unit, top_r)
                q = tl.exp2(b)
                d = a - b
            if JSD:
                mean = log2(tl.maximum((p + q) * half, TINY))  # precise near 1
                if not PLAIN:
                    mean -= level
            if GRAM or LIMITED:
                slopes = _separate(
                    p, q if COMPARES else p, a, d if COMPARES else p, mean if JSD else p,
                    halves(here + columns_of(VECTOR), VECTOR) == target, h, k_f, mass_f, mass_r,
                    k_p, whole, limit_f, limit_r, KINDS, LIMITED,
                )  # fmt: skip
                if GZ:
                    weights = (w_ent, w_fwd, w_rev, w_js, w_z, w_ce)
                    total = tl.zeros_like(p)
                    for k in tl.static_range(6):
                        if (KINDS >> k) & 1:
                            total = tl.fma(slopes[k], by * weights[k], total)
                    store_tile(gz_row, here, total, bound, VECTOR)
                if GRAM:
                    sums = _added(sums, slopes, KINDS)
            elif GZ:
                inner = tl.zeros_like(p) + constant
                if ENT:
                    inner = tl.fma(a, by_a, inner)
                if JSD:
                    inner = tl.fma(a - mean, by_mean, inner)
                if FWD:
                    inner = tl.fma(d, by_d, inner)
                total = p * inner
                if REV:
                    total = tl.fma(q, by_q, total)
                if CE:
                    if (target >= here) & (target < here + TILE):
                        hit = halves(here + columns_of(VECTOR), VECTOR) == target
                        total = tl.where(hit, total - by * w_ce, total)
                store_tile(gz_row, here, total, bound, VECTOR)
            if GR:
                pull_r = tl.zeros_like(p)
                if FWD:
                    if LIMITED:
                        ratio, inside = within(p, d, limit_f * LOG2E)
                        pull_r += w_fwd * (q * mass_f - p * inside)
                    else:
                        pull_r += w_fwd * (q - p)
                if REV:
                    if LIMITED:
                        ratio, inside = within(q, -d, limit_r * LOG2E)
                        pull = (ratio - k_r) * LN2 + inside - mass_r
                        pull_r += w_rev * tl.where(q == 0, 0.0, q * pull)
                    else:
                        pull_r += (w_rev * LN2) * q * (-d - k_r)
                if JSD:
                    pull_r += (0.5 * w_js * LN2) * q * (b - mean - k_q)
                store_tile(gr_row, here, by * pull_r, bound, VECTOR)
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
                    tl.store(products + n * items, product * (by * by))
                    n += 1


@triton.jit
def slopes_of(
    z_row, r_row, t_row, gz_row, gr_row, products, coefs, items, piece, tiles, classes, share,
    slope, unit, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
    KINDS: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr, GRAM: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
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
    z = load_tile(z_row, start, bound, VECTOR, PACKED, "evict_first")
    z_next = load_tile(z_row, start + TILE, bound, VECTOR, PACKED, "evict_first")
    r = z
    r_next = z
    if COMPARES:
        r = load_tile(r_row, start, bound, VECTOR, PACKED, "evict_first")
        r_next = load_tile(r_row, start + TILE, bound, VECTOR, PACKED, "evict_first")
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
    top = settled(coefs + Z_TOP, top_bits)
    level = settled(coefs + Z_LEVEL, level_bits)
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
        h = settled(coefs + H, h_bits)
    if COMPARES:
        top_r = settled(coefs + R_TOP, top_r_bits)
        level_r = settled(coefs + R_LEVEL, level_r_bits)
    if FWD:
        k_f = settled(coefs + K_F, k_f_bits)
        mass_f = settled(coefs + MASS_F, mass_f_bits)
    if REV:
        k_r = settled(coefs + K_R, k_r_bits)
        mass_r = settled(coefs + MASS_R, mass_r_bits)
    if FWD or REV:
        limited = settled(coefs + BEYOND, limited_bits) != 0
    if JSD:
        k_p = settled(coefs + K_P, k_p_bits)
        k_q = settled(coefs + K_Q, k_q_bits)
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
            load_tile(z_row, start, bound, FEW // 64, False, "evict_first"),
            load_tile(r_row, start, bound, FEW // 64, False, "evict_first"),
            load_tile(z_row, start + FEW, bound, FEW // 64, False, "evict_first"),
            load_tile(r_row, start + FEW, bound, FEW // 64, False, "evict_first"),
            z_row, r_row, gz_row, gr_row, products, items, start, tiles * (TILE // FEW),
            classes, target, by, unit, constant, top, level, top_r, level_r, h, k_f, mass_f,
            k_r, mass_r, k_p, k_q, whole, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
            KINDS, True, GZ, GR, GRAM, FEW // 64, False, 1,
        )  # fmt: skip
    else:
        _tiles(
            z, r, z_next, r_next, z_row, r_row, gz_row, gr_row, products, items, start, tiles,
            classes, target, by, unit, constant, top, level, top_r, level_r, h, k_f, mass_f,
            k_r, mass_r, k_p, k_q, whole, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
            KINDS, False, GZ, GR, GRAM, VECTOR, PACKED, UNROLL,
        )  # fmt: skip
