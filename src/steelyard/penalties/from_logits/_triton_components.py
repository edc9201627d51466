"""Pieces of the kernels that belong to single components: all that a new kind adds to them.

The stages of `_triton_passes` and the launches of `_triton_sweep` load, loop, wait and store; they
call the functions below for whatever depends on a kind. KINDS is a
constexpr, bit k for kind k, so every `if` on it is decided at compilation, and Triton inlines these
functions: a kernel contains the instructions of its own components only. Weights and limits are
tuples by kind; the weight of a kind that is not computed is 0. In a tuple that a function returns,
entries of kinds that are not computed hold some other value of the same type; they are never used
and cost nothing.

With x the logits and y the reference's, both times log2(e) / T, shifts m and m' (near the largest),
`p = 2^(x - m - level)`, `q = 2^(y - m' - level')`, and logarithms to the base 2 (factors LN2 turn
the results to nats), the stages are:

1. Statistics, by piece: with `e = 2^(x - m)`, `f = 2^(y - m')` and `d = (x - m) - (y - m')`

       entropy                   sum e * (x - m)
       forward, reverse KL       sum e * d, sum f * (-d); and max |d|, to see whether a log ratio
                                 may exceed the limit

2. Values, by row, from the sums over its pieces

       entropy                   H = level - sum p * (x - m)
       forward KL                sum p (log p - log q) = sum p * d + (level' - level)
       reverse KL                sum q (log q - log p) = -sum q * d - (level' - level)
       z-loss                    (m + level)^2; m + level is log2 of the sum of exp(logits / T)
       cross-entropy             -(x_target - m - level)

3. A middle pass, for kinds whose sums need p and q themselves

       JS                        (sum p log(p / M) + sum q log(q / M)) / 2, M = (p + q) / 2

4. Gradients by the scaled logits and by the scaled reference, with ratio = ln p - ln q, e_t the
   one-hot target and lse = ln sum exp(logits / T)

       entropy H          -p (ln p + H)
       forward KL         p (ratio - KL)               q - p
         limited          p (ratio - KL + in - mass)   q mass - p in
       reverse KL         p - q                        q (-ratio - KL)
         limited          p mass - q in                q (-ratio - KL + in - mass)
       JS                 p (ln p - ln M - K_P) / 2    q (ln q - ln M - K_Q) / 2
       z-loss             2 lse p
       cross-entropy      p - e_t

   K_P = sum p ln(p / M), K_Q the same by q. "Limited" is a row in which a log ratio exceeds the
   limit: `ratio` is clamped, `in` is 1 where the clamp passes a gradient, `mass` is the probability
   (of the distribution that weights the ratio) with in = 1. Each is a backward pass of softmax,
   `df/da - p sum df/da` for a = ln p.
"""

from collections.abc import Collection

import triton
import triton.language as tl

from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    ENTROPY,
    FORWARD,
    JS,
    NEED_REFERENCE,
    NEED_TARGETS,
    REVERSE,
    Z_LOSS,
)
from steelyard.penalties.from_logits._triton_tiles import (
    HUGE,
    LN2,
    LOG2E,
    R_LEVEL,
    R_TOP,
    SHARED_COEFFICIENTS,
    SMALL_TILE,
    TINY,
    Z_LEVEL,
    Z_TOP,
    both_halves,
    clamped_log2,
    columns_of,
    dot_by_thread,
    limit_ratio,
    load_tile,
    log2,
    log2_offset,
    max_by_thread,
    peek,
    publish,
    to_float32,
    wait_for,
    wait_for_all,
)

# Kinds that the kernels compute, 0, 1, … without a gap: a kind's number is its bit in KINDS and its
# place in tuples by kind. Other kinds run by the plain formulas: `_triton_sweep.fits` says no.
KERNEL_KINDS = (ENTROPY, FORWARD, REVERSE, JS, Z_LOSS, CROSS_ENTROPY)
KIND_COUNT = tl.constexpr(len(KERNEL_KINDS))
# Each kind as a bit of KINDS, and its place in tuples by kind. (A bit stands before KINDS in `&`,
# since Triton's interpreter has KINDS as an int, and an int takes no constexpr.)
ENT, FWD, REV, JSD, ZL, CE = (tl.constexpr(1 << kind) for kind in KERNEL_KINDS)
AT_ENT, AT_FWD, AT_REV, AT_JSD, AT_ZL, AT_CE = (tl.constexpr(i) for i in range(6))


def _bits(kinds):
    return tl.constexpr(sum(1 << kind for kind in kinds if kind in KERNEL_KINDS))


# Kinds as bits: those that read the reference, those that read targets, those with a middle pass,
# and those with a rare second path, for rows in which a log ratio exceeds the limit.
WITH_REFERENCE = _bits(NEED_REFERENCE)
WITH_TARGETS = _bits(NEED_TARGETS)
WITH_MIDDLE = _bits({JS})
WITH_LIMIT = _bits({FORWARD, REVERSE})

# Places of a row's coefficients, after those that all kinds share. Logarithms are to the base 2.
#   H                entropy
#   K_F, MASS_F      forward KL: sum p * ratio, and the mass of p whose ratio is within the limit
#   K_R, MASS_R      reverse KL: the same by q
#   LIMIT_HIT        1.0 if some log ratio of the row may exceed the limit
#   K_P, K_Q         JS: sum p log2(p / M) and sum q log2(q / M)
H, K_F, MASS_F, K_R, MASS_R, LIMIT_HIT, K_P, K_Q = (
    tl.constexpr(SHARED_COEFFICIENTS + i) for i in range(8)
)
COEFFICIENTS = tl.constexpr(SHARED_COEFFICIENTS + 8)


def statistics_count(kinds: Collection[int]) -> int:
    """Count the numbers that a piece publishes, in all passes; see `publish_sums`."""
    shared = 4 if NEED_REFERENCE.intersection(kinds) else 2
    ratios = sum(kind in kinds for kind in (FORWARD, REVERSE))
    return shared + (ENTROPY in kinds) + ratios + (ratios > 0) + 2 * has_middle_pass(kinds)


def has_middle_pass(kinds: Collection[int]) -> bool:
    return JS in kinds


# 1. Statistics of a piece.


@triton.jit
def new_sums():
    """Sums of each thread before the first tile, `[32]` each."""
    zeros = tl.zeros([32], tl.float32)
    return zeros, zeros, zeros, zeros


@triton.jit
def add_to_sums(sums, e, x, f, d, KINDS: tl.constexpr):
    """Add a tile: to the sums of e · x, e · d and f · d, and to the maximum of |d|."""
    sum_ex, sum_ed, sum_fd, max_d = sums
    if (ENT & KINDS) != 0:
        sum_ex = dot_by_thread(sum_ex, e, x)
    if (FWD & KINDS) != 0:
        sum_ed = dot_by_thread(sum_ed, e, d)
    if (REV & KINDS) != 0:
        sum_fd = dot_by_thread(sum_fd, f, d)
    if (WITH_LIMIT & KINDS) != 0:
        max_d = tl.maximum(max_d, max_by_thread(tl.abs(d)))
    return sum_ex, sum_ed, sum_fd, max_d


@triton.jit
def reduce_sums(sums, other, KINDS: tl.constexpr):
    """Reduce the sums across the warp; `other` where not computed."""
    sum_ex, sum_ed, sum_fd, max_d = sums
    moment = other
    cross_f = other
    cross_r = other
    max_ratio = other
    if (ENT & KINDS) != 0:
        moment = tl.sum(sum_ex, 0)
    if (FWD & KINDS) != 0:
        cross_f = tl.sum(sum_ed, 0)
    if (REV & KINDS) != 0:
        cross_r = -tl.sum(sum_fd, 0)
    if (WITH_LIMIT & KINDS) != 0:
        max_ratio = tl.max(max_d, 0)
    return moment, cross_f, cross_r, max_ratio


@triton.jit
def publish_sums(place, pieces, reduced, KINDS: tl.constexpr):
    """Publish the reduced sums of the kinds, one after the other, at a distance of `pieces`."""
    moment, cross_f, cross_r, max_ratio = reduced
    if (ENT & KINDS) != 0:
        publish(place, moment)
        place += pieces
    if (FWD & KINDS) != 0:
        publish(place, cross_f)
        place += pieces
    if (REV & KINDS) != 0:
        publish(place, cross_r)
        place += pieces
    if (WITH_LIMIT & KINDS) != 0:
        publish(place, max_ratio)


# 2. Values of a row, and the coefficients of its gradients.


@triton.jit
def peek_sums(place, valid, pieces, KINDS: tl.constexpr):
    """Issue the loads of what `publish_sums` published, by piece, without waiting for it."""
    moment = valid.to(tl.int32)
    cross_f = moment
    cross_r = moment
    max_ratio = moment
    if (ENT & KINDS) != 0:
        moment = peek(place, valid)
        place += pieces
    if (FWD & KINDS) != 0:
        cross_f = peek(place, valid)
        place += pieces
    if (REV & KINDS) != 0:
        cross_r = peek(place, valid)
        place += pieces
    if (WITH_LIMIT & KINDS) != 0:
        max_ratio = peek(place, valid)
    return moment, cross_f, cross_r, max_ratio


@triton.jit
def row_values(
    z_row, r_row, t_row, values, coefs, place, bits, valid, of_z, of_r, rows, classes, pieces,
    row_scale, log2_scale, weights, limits, KINDS: tl.constexpr,
):  # fmt: skip
    """Store the row's values and publish the coefficients of its gradients.

    Inputs:
        z_row: Pointer to the row's logits, `[classes]`; `r_row` to the reference's, `t_row` to its
            target.
        values: Pointer to the row in `[components, rows]`.
        coefs: Pointer to the row's coefficients, `[COEFFICIENTS]`.
        place: Where `publish_sums` published, by piece; `bits` is what `peek_sums` found there.
        valid: Which entries by piece exist.
        of_z: The row's softmax: (shift, level, 1 / S, whether it has no mass) and, by piece,
            (weight 2^(m_i - m), S_i, m_i - m); `of_r` the same of the reference.

    Returns:
        The weighted sum of the values, without those of the middle pass.
    """
    top, level, inv_sum, no_mass, part, sums, offset = of_z
    top_r, level_r, inv_sum_r, no_mass_r, part_r, sums_r, offset_r = of_r
    moment_bits, cross_f_bits, cross_r_bits, max_ratio_bits = bits
    total = tl.full([], 0.0, tl.float32)
    if (ENT & KINDS) != 0:
        moment = wait_for_all(place, valid, moment_bits)
        place += pieces
        h = level - tl.sum(part * (moment + sums * offset), 0) * inv_sum
        publish(coefs + H, h)
        total += weights[AT_ENT] * h * LN2
        tl.store(values, row_scale * h * LN2)
        values += rows
    if (WITH_LIMIT & KINDS) != 0:
        place_f = place
        if (FWD & KINDS) != 0:
            place += pieces
        place_r = place
        if (REV & KINDS) != 0:
            place += pieces
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
        if (FWD & KINDS) != 0:
            bound = tl.minimum(limits[AT_FWD] * LOG2E, HUGE)
            cross = wait_for_all(place_f, valid, cross_f_bits)
            k_f = tl.sum(part * (cross + sums * offset), 0) * inv_sum + gap
        if (REV & KINDS) != 0:
            bound = tl.minimum(limits[AT_REV] * LOG2E, bound)
            cross = wait_for_all(place_r, valid, cross_r_bits)
            k_r = tl.sum(part_r * (cross - sums_r * offset), 0) * inv_sum_r - gap
        limited = (max_ratio > bound) | no_mass | no_mass_r
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
                ratio, inside = limit_ratio(p, a - b, limits[AT_FWD] * LOG2E)
                k_f += tl.sum(p * ratio, 0)
                mass_f += tl.sum(p * inside, 0)
                ratio, inside = limit_ratio(q, b - a, limits[AT_REV] * LOG2E)
                k_r += tl.sum(q * ratio, 0)
                mass_r += tl.sum(q * inside, 0)
        if (FWD & KINDS) != 0:
            publish(coefs + K_F, k_f)
            publish(coefs + MASS_F, mass_f)
            total += weights[AT_FWD] * k_f * LN2
            tl.store(values, row_scale * k_f * LN2)
            values += rows
        if (REV & KINDS) != 0:
            publish(coefs + K_R, k_r)
            publish(coefs + MASS_R, mass_r)
            total += weights[AT_REV] * k_r * LN2
            tl.store(values, row_scale * k_r * LN2)
            values += rows
        publish(coefs + LIMIT_HIT, tl.where(limited, 1.0, 0.0))
    if (JSD & KINDS) != 0:
        values += rows  # the middle pass stores it
    if (ZL & KINDS) != 0:
        lse = tl.where(no_mass, float("inf"), (top + level) * LN2)
        total += weights[AT_ZL] * lse * lse
        tl.store(values, row_scale * lse * lse)
        values += rows
    if (CE & KINDS) != 0:
        target = tl.load(t_row)
        known = (target >= 0) & (target < classes)
        # A target that is no class gives NaN: to raise an error here would wait for the GPU.
        logit = tl.load(z_row + target, mask=known, other=float("nan")).to(tl.float32)
        loss = (level - tl.fma(logit, log2_scale, -top)) * LN2
        total += weights[AT_CE] * loss
        tl.store(values, row_scale * loss)
        values += rows
    return total


# 3. The middle pass.


@triton.jit
def middle_piece(
    z_row, r_row, values, coefs, sums, piece, tiles, classes, pieces, rows, row_scale, log2_scale,
    weights, KINDS: tl.constexpr, COUNT: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Sum up one piece for JS: p · log2(p / M) and q · log2(q / M).

    The program with the row's last piece adds up all pieces and stores the value, and its share of
    the weighted total after the total of the other kinds.

    Inputs:
        z_row: Pointer to the row's logits, `[classes]`; `r_row` to the reference's.
        values: Pointer to the row in `[COUNT + 2, rows]`.
        coefs: Pointer to the row's coefficients: shifts and levels are read, K_P and K_Q written.
        sums: Pointer to `[2, pieces]`, both sums by piece.
        piece: Which of the row's `pieces`, of `tiles` tiles each.
        COUNT: Number of components.
    """
    BEFORE: tl.constexpr = ((ENT & KINDS) != 0) + ((FWD & KINDS) != 0) + ((REV & KINDS) != 0)
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
        pieces_of_sums = sums + tl.arange(0, PIECES)
        valid = tl.arange(0, PIECES) < pieces
        bits_p = peek(pieces_of_sums, valid)
        bits_q = peek(pieces_of_sums + pieces, valid)
        k_p = tl.sum(wait_for_all(pieces_of_sums, valid, bits_p), 0)
        k_q = tl.sum(wait_for_all(pieces_of_sums + pieces, valid, bits_q), 0)
        publish(coefs + K_P, k_p)
        publish(coefs + K_Q, k_q)
        js = tl.maximum(0.5 * (k_p + k_q) * LN2, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(values + BEFORE * rows, row_scale * js)
        tl.store(values + (COUNT + 1) * rows, row_scale * weights[AT_JSD] * js)


# 4. Gradients.


@triton.jit
def wait_for_row(coefs, KINDS: tl.constexpr):
    """Wait until the row's values are known: until the last pass before the gradients is over."""
    place = coefs + (K_P if (WITH_MIDDLE & KINDS) != 0 else Z_TOP)
    wait_for(place, tl.load(place, volatile=True))


@triton.jit
def _peek_if(place, other, used: tl.constexpr):
    if used:
        return tl.load(place, volatile=True)
    return other


@triton.jit
def _wait_if(place, bits, other, used: tl.constexpr):
    if used:
        return wait_for(place, bits)
    return other


@triton.jit
def peek_coefficients(coefs, other, KINDS: tl.constexpr):
    """Issue the loads of the kinds' coefficients, without waiting; `other` where not computed."""
    F: tl.constexpr = (FWD & KINDS) != 0
    R: tl.constexpr = (REV & KINDS) != 0
    J: tl.constexpr = (JSD & KINDS) != 0
    return (
        _peek_if(coefs + H, other, (ENT & KINDS) != 0), _peek_if(coefs + K_F, other, F),
        _peek_if(coefs + MASS_F, other, F), _peek_if(coefs + K_R, other, R),
        _peek_if(coefs + MASS_R, other, R), _peek_if(coefs + LIMIT_HIT, other, F | R),
        _peek_if(coefs + K_P, other, J), _peek_if(coefs + K_Q, other, J),
    )  # fmt: skip


@triton.jit
def wait_for_coefficients(coefs, bits, other, KINDS: tl.constexpr):
    """(h, k_f, mass_f, k_r, mass_r, limit_hit, k_p, k_q); `other` where not computed."""
    F: tl.constexpr = (FWD & KINDS) != 0
    R: tl.constexpr = (REV & KINDS) != 0
    J: tl.constexpr = (JSD & KINDS) != 0
    return (
        _wait_if(coefs + H, bits[0], other, (ENT & KINDS) != 0),
        _wait_if(coefs + K_F, bits[1], other, F), _wait_if(coefs + MASS_F, bits[2], other, F),
        _wait_if(coefs + K_R, bits[3], other, R), _wait_if(coefs + MASS_R, bits[4], other, R),
        _wait_if(coefs + LIMIT_HIT, bits[5], other, F | R),
        _wait_if(coefs + K_P, bits[6], other, J), _wait_if(coefs + K_Q, bits[7], other, J),
    )  # fmt: skip


@triton.jit
def exceeds_limit(row):
    """Return whether a log ratio of the row may exceed the limit; of kinds WITH_LIMIT only."""
    return row[5] != 0


@triton.jit
def _two_lse(top, level):
    return 2.0 * (top + level) * LN2


@triton.jit
def linear_factors(row, top, level, level_r, grad_scale, weights, KINDS: tl.constexpr,
                   PLAIN: tl.constexpr):  # fmt: skip
    """Factors of the total gradient, which is linear in a few functions of a class.

    The total gradient by the logits is

        p (constant + by_a a + by_d d + by_mean (a - mean)) + by_q q - e_t.

    If nothing needs p and q themselves (PLAIN), the normalization and all row sums go into these
    few factors, once a row, and an element takes one fused multiply-add for each.

    Returns:
        (constant, by_a, by_d, by_q, by_mean, half, level_gap); the last two are for `log_mean`.
    """
    h, k_f, mass_f, k_r, mass_r, limit_hit, k_p, k_q = row
    # All that multiplies p and is the same for the whole row.
    constant = 0.0
    if (ENT & KINDS) != 0:
        constant -= weights[AT_ENT] * LN2 * h
    if (ZL & KINDS) != 0:
        constant += weights[AT_ZL] * _two_lse(top, level)
    if (CE & KINDS) != 0:
        constant += weights[AT_CE]
    if (JSD & KINDS) != 0:
        constant -= 0.5 * weights[AT_JSD] * LN2 * k_p
    if (FWD & KINDS) != 0:
        constant -= weights[AT_FWD] * LN2 * k_f
    if (REV & KINDS) != 0:
        constant += weights[AT_REV]
    constant *= grad_scale
    by_a = -grad_scale * weights[AT_ENT] * LN2
    by_d = grad_scale * weights[AT_FWD] * LN2
    by_q = -grad_scale * weights[AT_REV]
    by_mean = 0.5 * grad_scale * weights[AT_JSD] * LN2
    level_gap = level_r - level
    half = tl.full([], 0.5, tl.float32)
    if PLAIN:
        # In the loop a = x - m without its level, so p is 2^level too large; so is q with JS, which
        # adds them. Without JS b is y - m', and q is 2^level' too large. Undo it here.
        inv_sum = tl.exp2(-level)
        constant -= by_a * level
        by_q *= inv_sum
        if (JSD & KINDS) == 0:
            constant += by_d * level_gap
            by_q *= tl.exp2(-level_gap)
        constant *= inv_sum
        by_a *= inv_sum
        by_d *= inv_sum
        by_mean *= inv_sum
    else:
        half *= tl.exp2(level)
    return constant, by_a, by_d, by_q, by_mean, half, level_gap


@triton.jit
def log_p(x, log2_scale, top, level, KINDS: tl.constexpr, PLAIN: tl.constexpr):
    """log2 p of a tile; if PLAIN, without subtracting the level, clamped only where it is used."""
    if not PLAIN:
        return clamped_log2(x, log2_scale, top) - level
    if ((ENT | FWD | JSD) & KINDS) != 0:
        return clamped_log2(x, log2_scale, top)
    return log2_offset(x, log2_scale, top)


@triton.jit
def log_q(y, log2_scale, top_r, level_r, level_gap, KINDS: tl.constexpr, PLAIN: tl.constexpr):
    """log2 q of a tile; if PLAIN as `log_p`, with JS relative to the level of p."""
    if not PLAIN:
        return clamped_log2(y, log2_scale, top_r) - level_r
    if (JSD & KINDS) != 0:
        return clamped_log2(y, log2_scale, top_r) - level_gap
    if (FWD & KINDS) != 0:
        return clamped_log2(y, log2_scale, top_r)
    return log2_offset(y, log2_scale, top_r)


@triton.jit
def log_mean(p, q, half, level, KINDS: tl.constexpr, PLAIN: tl.constexpr):
    """log2 M of a tile, for JS: of 2^level M, near 1, where `log2` is most precise."""
    mean = p
    if (JSD & KINDS) != 0:
        mean = log2(tl.maximum((p + q) * half, TINY))
        if not PLAIN:
            mean -= level
    return mean


@triton.jit
def total_gradient(
    p, q, a, d, mean, here, target, factors, grad_scale, weights, KINDS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Weighted total of the gradients by the logits of a tile, by `linear_factors`, if PLAIN."""
    constant, by_a, by_d, by_q, by_mean, half, level_gap = factors
    inner = tl.zeros_like(p) + constant
    if (ENT & KINDS) != 0:
        inner = tl.fma(a, by_a, inner)
    if (JSD & KINDS) != 0:
        inner = tl.fma(a - mean, by_mean, inner)
    if (FWD & KINDS) != 0:
        inner = tl.fma(d, by_d, inner)
    total = p * inner
    if (REV & KINDS) != 0:
        total = tl.fma(q, by_q, total)
    if (CE & KINDS) != 0:
        # One tile of the row holds the target; the others skip the comparison.
        if (target >= here) & (target < here + 64 * VECTOR):
            is_target = both_halves(here + columns_of(VECTOR), VECTOR) == target
            total = tl.where(is_target, total - grad_scale * weights[AT_CE], total)
    return total


@triton.jit
def component_gradients(
    p, q, a, d, mean, is_target, row, top, level, limits, KINDS: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    """Gradient of each component by the scaled logits of a tile."""
    h, k_f, mass_f, k_r, mass_r, limit_hit, k_p, k_q = row
    g_ent = p
    g_fwd = p
    g_rev = p
    g_js = p
    g_z = p
    g_ce = p
    if (ENT & KINDS) != 0:
        g_ent = p * (a + h) * -LN2
    if (FWD & KINDS) != 0:
        if LIMITED:
            ratio, inside = limit_ratio(p, d, limits[AT_FWD] * LOG2E)
            g_fwd = tl.where(p == 0, 0.0, p * ((ratio - k_f) * LN2 + inside - mass_f))
        else:
            g_fwd = p * (d - k_f) * LN2
    if (REV & KINDS) != 0:
        if LIMITED:
            ratio, inside = limit_ratio(q, -d, limits[AT_REV] * LOG2E)
            g_rev = p * mass_r - q * inside
        else:
            g_rev = p - q
    if (JSD & KINDS) != 0:
        g_js = p * (a - mean - k_p) * (0.5 * LN2)
    if (ZL & KINDS) != 0:
        g_z = p * _two_lse(top, level)
    if (CE & KINDS) != 0:
        g_ce = tl.where(is_target, p - 1.0, p)
    return g_ent, g_fwd, g_rev, g_js, g_z, g_ce


@triton.jit
def reference_gradient(
    p, q, b, d, mean, row, weights, limits, KINDS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Weighted total of the gradients by the scaled reference of a tile."""
    h, k_f, mass_f, k_r, mass_r, limit_hit, k_p, k_q = row
    total = tl.zeros_like(p)
    if (FWD & KINDS) != 0:
        if LIMITED:
            ratio, inside = limit_ratio(p, d, limits[AT_FWD] * LOG2E)
            total += weights[AT_FWD] * (q * mass_f - p * inside)
        else:
            total += weights[AT_FWD] * (q - p)
    if (REV & KINDS) != 0:
        if LIMITED:
            ratio, inside = limit_ratio(q, -d, limits[AT_REV] * LOG2E)
            inner = (ratio - k_r) * LN2 + inside - mass_r
            total += weights[AT_REV] * tl.where(q == 0, 0.0, q * inner)
        else:
            total += (weights[AT_REV] * LN2) * q * (-d - k_r)
    if (JSD & KINDS) != 0:
        total += (0.5 * weights[AT_JSD] * LN2) * q * (b - mean - k_q)
    return total


@triton.jit
def _add_product(partial, a, b, both: tl.constexpr):
    if both:
        return dot_by_thread(partial, a, b)
    return partial


@triton.jit
def new_products():
    """Inner products of each thread before the first tile: `[32]` for each of the 21 pairs."""
    zeros = tl.zeros([32], tl.float32)
    return (
        zeros, zeros, zeros, zeros, zeros, zeros, zeros,
        zeros, zeros, zeros, zeros, zeros, zeros, zeros,
        zeros, zeros, zeros, zeros, zeros, zeros, zeros,
    )  # fmt: skip


@triton.jit
def add_products(s, g, KINDS: tl.constexpr):
    """Add a tile to the inner products of the gradients; pair (i, j) is at i (11 - i) / 2 + j."""
    E: tl.constexpr = (ENT & KINDS) != 0
    F: tl.constexpr = (FWD & KINDS) != 0
    R: tl.constexpr = (REV & KINDS) != 0
    J: tl.constexpr = (JSD & KINDS) != 0
    Z: tl.constexpr = (ZL & KINDS) != 0
    C: tl.constexpr = (CE & KINDS) != 0
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
