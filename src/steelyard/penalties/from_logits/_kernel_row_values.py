"""From the pieces of a row to its values and the coefficients of its gradients.

Piece i gives its shift m_i and `S_i = sum 2^(x - m_i)`. With `m = max m_i` and `w_i = 2^(m_i - m)`
the row's normalizer is `S = sum w_i S_i`, its level is `log2 S`, and `log2 p = x - m - level`.
Any other sum of a piece is corrected in the same way: `x - m = (x - m_i) + (m_i - m)`, so

    sum_row e * (x - m) = sum_i w_i * (moment_i + S_i * (m_i - m)).

With `c = sum e * (x - m) / S` the values are, in bits:

    entropy         H = level - c
    forward KL      sum p (log2 p - log2 q) = sum p * d + (level' - level), d as in the first visit
    reverse KL      sum q (log2 q - log2 p) = -sum q * d - (level' - level)
    z-loss          (m + level)^2, since m + level is log2 of the sum of exp(logits / T)
    cross-entropy   -(x_target - m - level)

and times LN2 (squared for the z-loss) in nats. JS = (sum p log(p / M) + sum q log(q / M)) / 2 with
M = (p + q) / 2 does not follow from sums of single logits: `js_piece` visits the pieces for it.
"""

import triton
import triton.language as tl

from steelyard.penalties.from_logits._kernel_signals import (
    K_F,
    K_P,
    K_Q,
    K_R,
    LIMIT_HIT,
    MASS_F,
    MASS_R,
    R_LEVEL,
    R_TOP,
    Z_LEVEL,
    Z_TOP,
    H,
    peek,
    publish,
    wait_for,
    wait_for_all,
)
from steelyard.penalties.from_logits._kernel_statistics import (
    SMALL_TILE,
)
from steelyard.penalties.from_logits._kernel_tiles import (
    HUGE,
    LN2,
    LOG2E,
    TINY,
    clamped_log2,
    dot_by_thread,
    limit_ratio,
    load_tile,
    log2,
    to_float32,
)


@triton.jit
def _tops(place, valid, bits):
    """Shift m of the row; m_i - m and 2^(m_i - m) by piece, both 0 for a piece of all -inf."""
    tops = wait_for_all(place, valid, bits)
    tops = tl.where(valid, tops, float("-inf"))
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    offset = tl.where(tops == float("-inf"), 0.0, tops - top)
    return top, offset, tl.where(tops == float("-inf"), 0.0, tl.exp2(offset))


@triton.jit
def _level(part, sums):
    """Level log2 S, 1 / S, and whether the row has no probability at all; then S counts as 1."""
    total = tl.sum(part * sums, 0)
    dead = total == 0
    total = tl.where(dead, 1.0, total)
    return tl.log2(total), 1.0 / total, dead


@triton.jit
def combine_row(
    z_row, r_row, t_row, values, coefs, stats, rows, classes, pieces, row_scale, log2_scale,
    w_ent, w_fwd, w_rev, w_z, w_ce, limit_f, limit_r, KINDS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Combine the pieces of a row: store its values, publish the coefficients of its gradients.

    Only the program with the row's last piece calls this. It adds the pieces up in their order, so
    the result does not depend on which program was faster.

    Inputs:
        z_row: Pointer to the row's logits, `[classes]`.
        r_row: The same for the reference.
        t_row: Pointer to the row's target.
        values: Pointer to the row in `[components + 1 (+ 1 with JS), rows]`.
        coefs: Pointer to the row's coefficients, `[COEFFICIENTS]`.
        stats: Pointer to the row's statistics, `[STATS, pieces]`, by all of its pieces.
        rows: Number of rows.
        classes: Length of a row.
        pieces: Number of pieces in a row.
        row_scale: Factor of the row.
        log2_scale: log2(e) / T.
        w_ent: Weight of the entropy; then those of the other components, of JS not here.
        limit_f: Limit of the log ratio in nats, of forward KL; then of reverse KL.
        KINDS: Bit k is set if component kind k is computed.
        PIECES: `pieces`, rounded up to a power of 2.
    """
    ENT: tl.constexpr = KINDS & 1
    FWD: tl.constexpr = (KINDS >> 1) & 1
    REV: tl.constexpr = (KINDS >> 2) & 1
    JSD: tl.constexpr = (KINDS >> 3) & 1
    ZL: tl.constexpr = (KINDS >> 4) & 1
    CE: tl.constexpr = (KINDS >> 5) & 1
    COMPARES: tl.constexpr = (KINDS & 14) != 0
    all_terms = 0.0
    piece = tl.arange(0, PIECES)
    valid = piece < pieces
    slot = stats + piece
    # Issue all loads at once, then wait for one after the other: the latencies overlap.
    tops_bits = peek(slot, valid)
    sums_bits = peek(slot + pieces, valid)
    place = slot + 2 * pieces
    if ENT:
        moment_bits = peek(place, valid)
        place_moment = place
        place += pieces
    if COMPARES:
        tops_r_bits = peek(place, valid)
        sums_r_bits = peek(place + pieces, valid)
        place_r = place
        place += 2 * pieces
    if FWD:
        cross_f_bits = peek(place, valid)
        place_f = place
        place += pieces
    if REV:
        cross_r_bits = peek(place, valid)
        place_rev = place
        place += pieces
    if FWD or REV:
        max_ratio_bits = peek(place, valid)
    top, offset, part = _tops(slot, valid, tops_bits)
    sums = wait_for_all(slot + pieces, valid, sums_bits)
    level, inv_sum, dead = _level(part, sums)
    publish(coefs + Z_TOP, top)
    publish(coefs + Z_LEVEL, level)
    if ENT:
        moment = wait_for_all(place_moment, valid, moment_bits)
        h = level - tl.sum(part * (moment + sums * offset), 0) * inv_sum
        publish(coefs + H, h)
        all_terms += w_ent * h * LN2
        tl.store(values, row_scale * h * LN2)
        values += rows
    if COMPARES:
        top_r, offset_r, part_r = _tops(place_r, valid, tops_r_bits)
        sums_r = wait_for_all(place_r + pieces, valid, sums_r_bits)
        level_r, inv_sum_r, dead_r = _level(part_r, sums_r)
        publish(coefs + R_TOP, top_r)
        publish(coefs + R_LEVEL, level_r)
    if FWD or REV:
        offset -= offset_r
        gap = level_r - level
        # |log2 p - log2 q| <= |d| + |offset| + |gap|: an upper bound for all classes of the row.
        max_ratio = wait_for_all(place, valid, max_ratio_bits)
        max_ratio = tl.max(tl.where(valid, max_ratio + tl.abs(offset), 0.0), 0) + tl.abs(gap)
        bound = HUGE
        k_f = 0.0
        k_r = 0.0
        mass_f = 1.0
        mass_r = 1.0
        if FWD:
            bound = tl.minimum(limit_f * LOG2E, HUGE)
            cross = wait_for_all(place_f, valid, cross_f_bits)
            k_f = tl.sum(part * (cross + sums * offset), 0) * inv_sum + gap
        if REV:
            bound = tl.minimum(limit_r * LOG2E, bound)
            cross = wait_for_all(place_rev, valid, cross_r_bits)
            k_r = tl.sum(part_r * (cross - sums_r * offset), 0) * inv_sum_r - gap
        limited = (max_ratio > bound) | dead | dead_r
        # Rare: the closed form holds without a limit only. Read the row again and clamp each ratio.
        # mass = sum p * inside, the mass that the clamp passes a gradient for.
        if limited:
            k_f = 0.0
            k_r = 0.0
            mass_f = 0.0
            mass_r = 0.0
            for i in range(0, classes, SMALL_TILE):
                column = i + tl.arange(0, SMALL_TILE)
                z = tl.load(z_row + column, mask=column < classes, other=float("-inf"))
                r = tl.load(r_row + column, mask=column < classes, other=float("-inf"))
                a = clamped_log2(z.to(tl.float32), log2_scale, top) - level
                b = clamped_log2(r.to(tl.float32), log2_scale, top_r) - level_r
                p = tl.exp2(a)
                q = tl.exp2(b)
                ratio, inside = limit_ratio(p, a - b, limit_f * LOG2E)
                k_f += tl.sum(p * ratio, 0)
                mass_f += tl.sum(p * inside, 0)
                ratio, inside = limit_ratio(q, b - a, limit_r * LOG2E)
                k_r += tl.sum(q * ratio, 0)
                mass_r += tl.sum(q * inside, 0)
        if FWD:
            publish(coefs + K_F, k_f)
            publish(coefs + MASS_F, mass_f)
            all_terms += w_fwd * k_f * LN2
            tl.store(values, row_scale * k_f * LN2)
            values += rows
        if REV:
            publish(coefs + K_R, k_r)
            publish(coefs + MASS_R, mass_r)
            all_terms += w_rev * k_r * LN2
            tl.store(values, row_scale * k_r * LN2)
            values += rows
        publish(coefs + LIMIT_HIT, tl.where(limited, 1.0, 0.0))
    if JSD:
        values += rows  # `js_piece` stores the value and its share of the total
    if ZL:
        two_lse = tl.where(dead, float("inf"), (top + level) * LN2)
        all_terms += w_z * two_lse * two_lse
        tl.store(values, row_scale * two_lse * two_lse)
        values += rows
    if CE:
        target = tl.load(t_row)
        known = (target >= 0) & (target < classes)
        # A target that is no class gives NaN: to raise an error here would wait for the GPU.
        logit = tl.load(z_row + target, mask=known, other=float("nan")).to(tl.float32)
        loss = (level - tl.fma(logit, log2_scale, -top)) * LN2
        all_terms += w_ce * loss
        tl.store(values, row_scale * loss)
        values += rows
    tl.store(values, row_scale * all_terms)


@triton.jit
def js_piece(
    z_row, r_row, value, total, coefs, sums, piece, tiles, classes, pieces, row_scale, log2_scale,
    w_js, VECTOR: tl.constexpr, PACKED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Sum up one piece for JS: p · log2(p / M) and q · log2(q / M), M = (p + q) / 2.

    The program with the row's last piece adds up all pieces and stores the value.

    Inputs:
        z_row: Pointer to the row's logits, `[classes]`.
        r_row: The same for the reference.
        value: Pointer to the row's value of JS.
        total: Pointer to what JS adds to the row's weighted total.
        coefs: Pointer to the row's coefficients: shifts and levels are read, K_P and K_Q written.
        sums: Pointer to `[2, pieces]`, both sums by piece.
        piece: Which piece of the row.
        tiles: Number of tiles in a piece.
        classes: Length of the row.
        pieces: Number of pieces in a row.
        row_scale: Factor of the row.
        log2_scale: log2(e) / T.
        w_js: Weight of JS.
        VECTOR: Elements in 16 bytes.
        PACKED: Whether 16-bit floats are loaded two to a word.
        PIECES: `pieces`, rounded up to a power of 2.
    """
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
    top = wait_for(coefs + Z_TOP, bits)
    level = wait_for(coefs + Z_LEVEL, bits_level)
    top_r = wait_for(coefs + R_TOP, bits_r)
    level_r = wait_for(coefs + R_LEVEL, bits_level_r)
    # p and q are both taken times 2^level, and the sums divided by it at the end: the logarithms
    # keep their differences, p needs no subtraction, and the argument of `log2`, which is most
    # precise near 1, is near 1 where most of the mass is.
    level_gap = level_r - level
    inv_sum = tl.exp2(-level)
    of_p = tl.zeros([32], tl.float32)
    of_q = tl.zeros([32], tl.float32)
    for i in range(tiles):
        z_last = load_tile(z_row, start + (i + 2) * TILE, bound, VECTOR, PACKED, "evict_last")
        r_last = load_tile(r_row, start + (i + 2) * TILE, bound, VECTOR, PACKED, "evict_last")
        a = clamped_log2(to_float32(z, z_type, VECTOR, PACKED), log2_scale, top)
        b = clamped_log2(to_float32(r, r_type, VECTOR, PACKED), log2_scale, top_r) - level_gap
        p = tl.exp2(a)
        q = tl.exp2(b)
        mean = log2(tl.maximum(0.5 * (p + q), TINY))
        of_p = dot_by_thread(of_p, p, a - mean)
        of_q = dot_by_thread(of_q, q, b - mean)
        z = z_next
        r = r_next
        z_next = z_last
        r_next = r_last
    publish(sums + piece, tl.sum(of_p, 0) * inv_sum)
    publish(sums + pieces + piece, tl.sum(of_q, 0) * inv_sum)
    if piece == pieces - 1:
        each = sums + tl.arange(0, PIECES)
        own = tl.arange(0, PIECES) < pieces
        bits_p = peek(each, own)
        bits_q = peek(each + pieces, own)
        k_p = tl.sum(wait_for_all(each, own, bits_p), 0)
        k_q = tl.sum(wait_for_all(each + pieces, own, bits_q), 0)
        publish(coefs + K_P, k_p)
        publish(coefs + K_Q, k_q)
        js = tl.maximum(0.5 * (k_p + k_q) * LN2, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(value, row_scale * js)
        tl.store(total, row_scale * w_js * js)
