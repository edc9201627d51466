"""From the pieces of a row to its values and the coefficients of its gradients."""

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
    all_settled,
    glance,
    publish,
    settled,
)
from steelyard.penalties.from_logits._kernel_statistics import (
    FEW,
)
from steelyard.penalties.from_logits._kernel_tiles import (
    HUGE,
    LN2,
    LOG2E,
    TINY,
    dot_by_thread,
    floats,
    load_tile,
    log2,
    logs,
    within,
)


@triton.jit
def _tops(place, there, bits):
    """The largest logit of a row, of its pieces, and the pieces' shares of 2 ** logit."""
    tops = all_settled(place, there, bits)
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
def combine(
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
    tops_bits = glance(slot, there)
    sums_bits = glance(slot + pieces, there)
    place = slot + 2 * pieces
    if ENT:
        moment_bits = glance(place, there)
        place_moment = place
        place += pieces
    if COMPARES:
        tops_r_bits = glance(place, there)
        sums_r_bits = glance(place + pieces, there)
        place_r = place
        place += 2 * pieces
    if FWD:
        cross_f_bits = glance(place, there)
        place_f = place
        place += pieces
    if REV:
        cross_r_bits = glance(place, there)
        place_rev = place
        place += pieces
    if FWD or REV:
        most_bits = glance(place, there)
    top, off, part = _tops(slot, there, tops_bits)
    sums = all_settled(slot + pieces, there, sums_bits)
    level, over, dead = _level(part, sums)
    publish(coefs + Z_TOP, top)
    publish(coefs + Z_LEVEL, level)
    if ENT:
        moment = all_settled(place_moment, there, moment_bits)
        h = level - tl.sum(part * (moment + sums * off), 0) * over
        publish(coefs + H, h)
        all_terms += w_ent * h * LN2
        tl.store(values, share * h * LN2)
        values += rows
    if COMPARES:
        top_r, off_r, part_r = _tops(place_r, there, tops_r_bits)
        sums_r = all_settled(place_r + pieces, there, sums_r_bits)
        level_r, over_r, dead_r = _level(part_r, sums_r)
        publish(coefs + R_TOP, top_r)
        publish(coefs + R_LEVEL, level_r)
    if FWD or REV:
        off -= off_r
        gap = level_r - level
        most = all_settled(place, there, most_bits)
        most = tl.max(tl.where(there, most + tl.abs(off), 0.0), 0) + tl.abs(gap)
        bound = HUGE
        k_f = 0.0
        k_r = 0.0
        mass_f = 1.0
        mass_r = 1.0
        if FWD:
            bound = tl.minimum(limit_f * LOG2E, HUGE)
            cross = all_settled(place_f, there, cross_f_bits)
            k_f = tl.sum(part * (cross + sums * off), 0) * over + gap
        if REV:
            bound = tl.minimum(limit_r * LOG2E, bound)
            cross = all_settled(place_rev, there, cross_r_bits)
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
                a = logs(z.to(tl.float32), unit, top) - level
                b = logs(r.to(tl.float32), unit, top_r) - level_r
                p = tl.exp2(a)
                q = tl.exp2(b)
                ratio, inside = within(p, a - b, limit_f * LOG2E)
                k_f += tl.sum(p * ratio, 0)
                mass_f += tl.sum(p * inside, 0)
                ratio, inside = within(q, b - a, limit_r * LOG2E)
                k_r += tl.sum(q * ratio, 0)
                mass_r += tl.sum(q * inside, 0)
        if FWD:
            publish(coefs + K_F, k_f)
            publish(coefs + MASS_F, mass_f)
            all_terms += w_fwd * k_f * LN2
            tl.store(values, share * k_f * LN2)
            values += rows
        if REV:
            publish(coefs + K_R, k_r)
            publish(coefs + MASS_R, mass_r)
            all_terms += w_rev * k_r * LN2
            tl.store(values, share * k_r * LN2)
            values += rows
        publish(coefs + BEYOND, tl.where(limited, 1.0, 0.0))
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
def means(
    z_row, r_row, value, total, coefs, sums, piece, tiles, classes, pieces, share, unit, w_js,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One piece of JS: Σ p · log(p / m) and Σ q · log(q / m); the last one adds them up."""
    TILE: tl.constexpr = 64 * VECTOR
    start = piece * (tiles * TILE)
    bound = tl.minimum(start + tiles * TILE, classes)
    z_type: tl.constexpr = z_row.dtype.element_ty
    r_type: tl.constexpr = r_row.dtype.element_ty
    z = load_tile(z_row, start, bound, VECTOR, PACKED, "evict_last")
    r = load_tile(r_row, start, bound, VECTOR, PACKED, "evict_last")
    z_next = load_tile(z_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    r_next = load_tile(r_row, start + TILE, bound, VECTOR, PACKED, "evict_last")
    bits = tl.load(coefs + Z_TOP, volatile=True)
    bits_level = tl.load(coefs + Z_LEVEL, volatile=True)
    bits_r = tl.load(coefs + R_TOP, volatile=True)
    bits_level_r = tl.load(coefs + R_LEVEL, volatile=True)
    top = settled(coefs + Z_TOP, bits)
    level = settled(coefs + Z_LEVEL, bits_level)
    top_r = settled(coefs + R_TOP, bits_r)
    level_r = settled(coefs + R_LEVEL, bits_level_r)
    # Both times 2 ** level: the logarithm is precise near 1, and that is where most of p is.
    apart = level_r - level
    over = tl.exp2(-level)
    of_p = tl.zeros([32], tl.float32)
    of_q = tl.zeros([32], tl.float32)
    for i in range(tiles):
        z_last = load_tile(z_row, start + (i + 2) * TILE, bound, VECTOR, PACKED, "evict_last")
        r_last = load_tile(r_row, start + (i + 2) * TILE, bound, VECTOR, PACKED, "evict_last")
        a = logs(floats(z, z_type, VECTOR, PACKED), unit, top)
        b = logs(floats(r, r_type, VECTOR, PACKED), unit, top_r) - apart
        p = tl.exp2(a)
        q = tl.exp2(b)
        mean = log2(tl.maximum(0.5 * (p + q), TINY))
        of_p = dot_by_thread(of_p, p, a - mean)
        of_q = dot_by_thread(of_q, q, b - mean)
        z = z_next
        r = r_next
        z_next = z_last
        r_next = r_last
    publish(sums + piece, tl.sum(of_p, 0) * over)
    publish(sums + pieces + piece, tl.sum(of_q, 0) * over)
    if piece == pieces - 1:
        each = sums + tl.arange(0, PIECES)
        own = tl.arange(0, PIECES) < pieces
        bits_p = glance(each, own)
        bits_q = glance(each + pieces, own)
        k_p = tl.sum(all_settled(each, own, bits_p), 0)
        k_q = tl.sum(all_settled(each + pieces, own, bits_q), 0)
        publish(coefs + K_P, k_p)
        publish(coefs + K_Q, k_q)
        js = tl.maximum(0.5 * (k_p + k_q) * LN2, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(value, share * js)
        tl.store(total, share * w_js * js)
