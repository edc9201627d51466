"""Second visit to a piece of a row: the gradients and their inner products.

With `p = softmax(z / T)`, `q` of the reference, ratio = ln p - ln q, M = (p + q) / 2 and e_t the
one-hot target, the gradients of the components by the scaled logits z / T are

    entropy H             -p (ln p + H)
    forward KL            p (ratio - KL)                  limited: p (ratio - KL + inside - mass)
    reverse KL            p - q                           limited: p mass - q inside
    JS                    p (ln p - ln M - K_P) / 2       K_P = sum p ln(p / M)
    z-loss                2 lse p                         lse = ln sum exp(z / T)
    cross-entropy         p - e_t

and by the scaled reference

    forward KL            q - p                           limited: q mass - p inside
    reverse KL            q (-ratio - KL)                 limited: q (-ratio - KL + inside - mass)
    JS                    q (ln q - ln M - K_Q) / 2       K_Q = sum q ln(q / M)

"Limited" is a row in which a log ratio exceeds the limit: `ratio` is clamped, `inside` is 1 where
the clamp passes a gradient, `mass` is the probability (of the distribution that weights the ratio)
with inside = 1. Every gradient is a backward pass of softmax: `df/da - p sum df/da`, a = ln p.
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
    wait_for,
)
from steelyard.penalties.from_logits._kernel_statistics import (
    SMALL_TILE,
)
from steelyard.penalties.from_logits._kernel_tiles import (
    LN2,
    LOG2E,
    TINY,
    both_halves,
    clamped_log2,
    columns_of,
    dot_by_thread,
    limit_ratio,
    load_tile,
    log2,
    log2_offset,
    store_tile,
    to_float32,
)


@triton.jit
def _component_gradients(
    p, q, a, d, mean, is_target, h, k_f, mass_f, mass_r, k_p, two_lse, limit_f, limit_r,
    KINDS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Gradient of each component by the scaled logits; p in the place of those not computed."""
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
            ratio, inside = limit_ratio(p, d, limit_f * LOG2E)
            g_fwd = tl.where(p == 0, 0.0, p * ((ratio - k_f) * LN2 + inside - mass_f))
        else:
            g_fwd = p * (d - k_f) * LN2
    if (KINDS >> 2) & 1:
        if LIMITED:
            ratio, inside = limit_ratio(q, -d, limit_r * LOG2E)
            g_rev = p * mass_r - q * inside
        else:
            g_rev = p - q
    if (KINDS >> 3) & 1:
        g_js = p * (a - mean - k_p) * (0.5 * LN2)
    if (KINDS >> 4) & 1:
        g_z = p * two_lse
    if (KINDS >> 5) & 1:
        g_ce = tl.where(is_target, p - 1.0, p)
    return g_ent, g_fwd, g_rev, g_js, g_z, g_ce


@triton.jit
def _add_product(partial, a, b, both: tl.constexpr):
    if both:
        return dot_by_thread(partial, a, b)
    return partial


@triton.jit
def _add_products(s, g, KINDS: tl.constexpr):
    """Add one tile to each thread's inner products: `[32]` for each of the 6 · 7 / 2 pairs."""
    E: tl.constexpr = KINDS & 1
    F: tl.constexpr = (KINDS >> 1) & 1
    R: tl.constexpr = (KINDS >> 2) & 1
    J: tl.constexpr = (KINDS >> 3) & 1
    Z: tl.constexpr = (KINDS >> 4) & 1
    C: tl.constexpr = (KINDS >> 5) & 1
    return (
        _add_product(s[0], g[0], g[0], E), _add_product(s[1], g[0], g[1], E & F),
        _add_product(s[2], g[0], g[2], E & R), _add_product(s[3], g[0], g[3], E & J),
        _add_product(s[4], g[0], g[4], E & Z), _add_product(s[5], g[0], g[5], E & C),
        _add_product(s[6], g[1], g[1], F), _add_product(s[7], g[1], g[2], F & R),
        _add_product(s[8], g[1], g[3], F & J), _add_product(s[9], g[1], g[4], F & Z),
        _add_product(s[10], g[1], g[5], F & C), _add_product(s[11], g[2], g[2], R),
        _add_product(s[12], g[2], g[3], R & J), _add_product(s[13], g[2], g[4], R & Z),
        _add_product(s[14], g[2], g[5], R & C), _add_product(s[15], g[3], g[3], J),
        _add_product(s[16], g[3], g[4], J & Z), _add_product(s[17], g[3], g[5], J & C),
        _add_product(s[18], g[4], g[4], Z), _add_product(s[19], g[4], g[5], Z & C),
        _add_product(s[20], g[5], g[5], C),
    )  # fmt: skip


@triton.jit
def _tiles(
    z, r, z_next, r_next, z_row, r_row, gz_row, gr_row, gram_piece, items, start, tiles, classes,
    target, grad_scale, log2_scale, constant, top, level, top_r, level_r, h, k_f, mass_f, k_r,
    mass_r, k_p, k_q, two_lse, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
    KINDS: tl.constexpr, LIMITED: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr,
    GRAM: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the gradients of some tiles, given the row's coefficients.

    Inputs:
        z: First tile of the logits, loaded before the coefficients were waited for.
        r: The same of the reference.
        z_next: Second tile of the logits.
        r_next: The same of the reference.
        z_row: Pointer to the row's logits, `[classes]`; then the reference's.
        gz_row: Pointer to the row of the gradient by the logits; then by the reference.
        gram_piece: Pointer to the piece in `[pairs, items]`.
        items: Rows times pieces.
        start: First class of the piece.
        tiles: Number of tiles in the piece.
        classes: Length of the row.
        target: The row's target, or -1.
        grad_scale: row_scale / T, the factor of all gradients.
        log2_scale: log2(e) / T.
        constant: grad_scale times all that is multiplied by p alone.
        top: Coefficients of the row, as in `_kernel_signals`, until `k_q`.
        two_lse: 2 logsumexp(z / T), for the z-loss.
        w_ent: Weight of the entropy; then those of the other components, and the limits.
        KINDS: Bit k is set if component kind k is computed.
        LIMITED: Whether a log ratio of the row may exceed the limit.
        GZ: Whether to write the gradient by the logits.
        GR: Whether to write the gradient by the reference.
        GRAM: Whether to write the inner products of the components' gradients.
        VECTOR: Elements in 16 bytes.
        PACKED: Whether 16-bit floats are loaded two to a word.
        UNROLL: Tiles in one turn of the loop.
    """
    ENT: tl.constexpr = KINDS & 1
    FWD: tl.constexpr = (KINDS >> 1) & 1
    REV: tl.constexpr = (KINDS >> 2) & 1
    JSD: tl.constexpr = (KINDS >> 3) & 1
    CE: tl.constexpr = (KINDS >> 5) & 1
    COMPARES: tl.constexpr = (KINDS & 14) != 0
    TILE: tl.constexpr = 64 * VECTOR
    # The total gradient is p (constant + by_a a + by_d d + by_mean (a - mean)) + by_q q - e_t. If
    # nothing needs p and q themselves, the normalization and all row sums go into these few
    # coefficients, and an element takes one fused multiply-add for each.
    PLAIN: tl.constexpr = not (GRAM or LIMITED or GR)
    zeros = tl.zeros([32], tl.float32)
    sums = (
        zeros, zeros, zeros, zeros, zeros, zeros, zeros,
        zeros, zeros, zeros, zeros, zeros, zeros, zeros,
        zeros, zeros, zeros, zeros, zeros, zeros, zeros,
    )  # fmt: skip
    bound = tl.minimum(start + tiles * TILE, classes)
    z_type: tl.constexpr = z_row.dtype.element_ty
    r_type: tl.constexpr = r_row.dtype.element_ty
    by_a = -grad_scale * w_ent * LN2
    by_d = grad_scale * w_fwd * LN2
    by_q = -grad_scale * w_rev
    by_mean = 0.5 * grad_scale * w_js * LN2
    level_gap = level_r - level
    half = 0.5
    if PLAIN:
        # In the loop a = x - m without its level, so p is 2^level too large; so is q with JS, which
        # adds them. Without JS b is y - m', and q is 2^level' too large. Undo it here, once a row.
        inv_sum = tl.exp2(-level)
        constant -= by_a * level
        by_q *= inv_sum
        if not JSD:
            constant += by_d * level_gap
            by_q *= tl.exp2(-level_gap)
        constant *= inv_sum
        by_a *= inv_sum
        by_d *= inv_sum
        by_mean *= inv_sum
    else:
        half *= tl.exp2(level)
    for first in range(0, tiles, UNROLL):
        for second in tl.static_range(UNROLL):
            here = start + (first + second) * TILE
            z_last = load_tile(z_row, here + 2 * TILE, bound, VECTOR, PACKED, "evict_first")
            r_last = z_last
            if COMPARES:
                r_last = load_tile(r_row, here + 2 * TILE, bound, VECTOR, PACKED, "evict_first")
            a = to_float32(z, z_type, VECTOR, PACKED)
            if not PLAIN:
                a = clamped_log2(a, log2_scale, top) - level
            elif ENT or FWD or JSD:
                a = clamped_log2(a, log2_scale, top)
            else:
                a = log2_offset(a, log2_scale, top)
            p = tl.exp2(a)
            if COMPARES:
                b = to_float32(r, r_type, VECTOR, PACKED)
                if not PLAIN:
                    b = clamped_log2(b, log2_scale, top_r) - level_r
                elif JSD:
                    b = clamped_log2(b, log2_scale, top_r) - level_gap
                elif FWD:
                    b = clamped_log2(b, log2_scale, top_r)
                else:
                    b = log2_offset(b, log2_scale, top_r)
                q = tl.exp2(b)
                d = a - b
            if JSD:
                # log2 M, of a number near 1, where `log2` is most precise: 2^level M.
                mean = log2(tl.maximum((p + q) * half, TINY))
                if not PLAIN:
                    mean -= level
            if GRAM or LIMITED:
                gradients = _component_gradients(
                    p, q if COMPARES else p, a, d if COMPARES else p, mean if JSD else p,
                    both_halves(here + columns_of(VECTOR), VECTOR) == target, h, k_f, mass_f,
                    mass_r, k_p, two_lse, limit_f, limit_r, KINDS, LIMITED,
                )  # fmt: skip
                if GZ:
                    weights = (w_ent, w_fwd, w_rev, w_js, w_z, w_ce)
                    total = tl.zeros_like(p)
                    for k in tl.static_range(6):
                        if (KINDS >> k) & 1:
                            total = tl.fma(gradients[k], grad_scale * weights[k], total)
                    store_tile(gz_row, here, total, bound, VECTOR)
                if GRAM:
                    sums = _add_products(sums, gradients, KINDS)
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
                    # One tile of the row holds the target; the others skip the comparison.
                    if (target >= here) & (target < here + TILE):
                        is_target = both_halves(here + columns_of(VECTOR), VECTOR) == target
                        total = tl.where(is_target, total - grad_scale * w_ce, total)
                store_tile(gz_row, here, total, bound, VECTOR)
            if GR:
                grad_r = tl.zeros_like(p)
                if FWD:
                    if LIMITED:
                        ratio, inside = limit_ratio(p, d, limit_f * LOG2E)
                        grad_r += w_fwd * (q * mass_f - p * inside)
                    else:
                        grad_r += w_fwd * (q - p)
                if REV:
                    if LIMITED:
                        ratio, inside = limit_ratio(q, -d, limit_r * LOG2E)
                        inner = (ratio - k_r) * LN2 + inside - mass_r
                        grad_r += w_rev * tl.where(q == 0, 0.0, q * inner)
                    else:
                        grad_r += (w_rev * LN2) * q * (-d - k_r)
                if JSD:
                    grad_r += (0.5 * w_js * LN2) * q * (b - mean - k_q)
                store_tile(gr_row, here, grad_scale * grad_r, bound, VECTOR)
            z = z_next
            r = r_next
            z_next = z_last
            r_next = r_last
    if GRAM:
        n = 0
        for i in tl.static_range(6):
            for j in tl.static_range(i, 6):
                if (KINDS >> i) & (KINDS >> j) & 1:
                    # Pair (i, j), i <= j, of six is at i (11 - i) / 2 + j.
                    product = tl.sum(sums[i * (11 - i) // 2 + j], 0)
                    tl.store(gram_piece + n * items, product * (grad_scale * grad_scale))
                    n += 1


@triton.jit
def gradient_piece(
    z_row, r_row, t_row, gz_row, gr_row, gram_piece, coefs, items, piece, tiles, classes, row_scale,
    inv_temperature, log2_scale, w_ent, w_fwd, w_rev, w_js, w_z, w_ce, limit_f, limit_r,
    KINDS: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr, GRAM: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Wait for the row's coefficients and write the gradients of one piece.

    Inputs:
        z_row: Pointer to the row's logits, `[classes]`.
        r_row: The same for the reference.
        t_row: Pointer to the row's target.
        gz_row: Pointer to the row of the gradient by the logits.
        gr_row: Pointer to the row of the gradient by the reference.
        gram_piece: Pointer to the piece in `[pairs, items]`, inner products by piece.
        coefs: Pointer to the row's coefficients, `[COEFFICIENTS]`.
        items: Rows times pieces.
        piece: Which piece of the row.
        tiles: Number of tiles in a piece.
        classes: Length of the row.
        row_scale: Factor of the row.
        inv_temperature: 1 / T.
        log2_scale: log2(e) / T.
        w_ent: Weight of the entropy; then those of the other components, and the limits.
        KINDS: Bit k is set if component kind k is computed; the others as for `_tiles`.
    """
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
    # Before waiting for the coefficients, start to load. This is the last use: evict it first.
    z = load_tile(z_row, start, bound, VECTOR, PACKED, "evict_first")
    z_next = load_tile(z_row, start + TILE, bound, VECTOR, PACKED, "evict_first")
    r = z
    r_next = z
    if COMPARES:
        r = load_tile(r_row, start, bound, VECTOR, PACKED, "evict_first")
        r_next = load_tile(r_row, start + TILE, bound, VECTOR, PACKED, "evict_first")
    # Issue all loads at once, then wait for one after the other: the latencies overlap.
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
        limited_bits = tl.load(coefs + LIMIT_HIT, volatile=True)
    if JSD:
        k_p_bits = tl.load(coefs + K_P, volatile=True)
        k_q_bits = tl.load(coefs + K_Q, volatile=True)
    target = -1
    if CE:
        target = tl.load(t_row).to(tl.int32)
    top = wait_for(coefs + Z_TOP, top_bits)
    level = wait_for(coefs + Z_LEVEL, level_bits)
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
        h = wait_for(coefs + H, h_bits)
    if COMPARES:
        top_r = wait_for(coefs + R_TOP, top_r_bits)
        level_r = wait_for(coefs + R_LEVEL, level_r_bits)
    if FWD:
        k_f = wait_for(coefs + K_F, k_f_bits)
        mass_f = wait_for(coefs + MASS_F, mass_f_bits)
    if REV:
        k_r = wait_for(coefs + K_R, k_r_bits)
        mass_r = wait_for(coefs + MASS_R, mass_r_bits)
    if FWD or REV:
        limited = wait_for(coefs + LIMIT_HIT, limited_bits) != 0
    if JSD:
        k_p = wait_for(coefs + K_P, k_p_bits)
        k_q = wait_for(coefs + K_Q, k_q_bits)
    two_lse = 2.0 * (top + level) * LN2
    grad_scale = row_scale * inv_temperature
    # All that multiplies p and is the same for the whole row.
    constant = 0.0
    if ENT:
        constant -= w_ent * LN2 * h
    if ZL:
        constant += w_z * two_lse
    if CE:
        constant += w_ce
    if JSD:
        constant -= 0.5 * w_js * LN2 * k_p
    if FWD:
        constant -= w_fwd * LN2 * k_f
    if REV:
        constant += w_rev
    constant *= grad_scale
    # Rare. Small tiles, so that this path does not raise the kernel's number of registers.
    if limited:
        _tiles(
            load_tile(z_row, start, bound, SMALL_TILE // 64, False, "evict_first"),
            load_tile(r_row, start, bound, SMALL_TILE // 64, False, "evict_first"),
            load_tile(z_row, start + SMALL_TILE, bound, SMALL_TILE // 64, False, "evict_first"),
            load_tile(r_row, start + SMALL_TILE, bound, SMALL_TILE // 64, False, "evict_first"),
            z_row, r_row, gz_row, gr_row, gram_piece, items, start, tiles * (TILE // SMALL_TILE),
            classes, target, grad_scale, log2_scale, constant, top, level, top_r, level_r, h, k_f,
            mass_f, k_r, mass_r, k_p, k_q, two_lse, w_ent, w_fwd, w_rev, w_js, w_z, w_ce,
            limit_f, limit_r,
            KINDS, True, GZ, GR, GRAM, SMALL_TILE // 64, False, 1,
        )  # fmt: skip
    else:
        _tiles(
            z, r, z_next, r_next, z_row, r_row, gz_row, gr_row, gram_piece, items, start, tiles,
            classes, target, grad_scale, log2_scale, constant, top, level, top_r, level_r, h, k_f,
            mass_f, k_r, mass_r, k_p, k_q, two_lse, w_ent, w_fwd, w_rev, w_js, w_z, w_ce,
            limit_f, limit_r,
            KINDS, False, GZ, GR, GRAM, VECTOR, PACKED, UNROLL,
        )  # fmt: skip
