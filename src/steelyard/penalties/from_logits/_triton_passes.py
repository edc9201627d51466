"""First visit to a piece of a row: the sums from which the row's values follow.

With x the logits and y the reference's, both times log2(e) / T, a shift m for each (near the
largest number), `e = 2^(x - m)`, `f = 2^(y - m')` and `d = (x - m) - (y - m')`, a piece hands on

    m, sum e                    softmax: p = e / sum e
    m', sum f                   softmax of the reference: q = f / sum f
    sums of single components   `_triton_components.add_to_sums`

`combine_row` adds the pieces up, each corrected by its own shift. That is the
one-pass ("online") softmax, with one correction for each piece rather than for each element:
Milakov & Gimelshein (2018), "Online normalizer calculation for softmax", arXiv:1805.02867.
"""

import triton
import triton.language as tl

from steelyard.penalties.from_logits._triton_components import (
    KIND_COUNT,
    WITH_LIMIT,
    WITH_REFERENCE,
    WITH_TARGETS,
    add_products,
    add_to_sums,
    component_gradients,
    exceeds_limit,
    linear_factors,
    log_mean,
    log_p,
    log_q,
    new_products,
    new_sums,
    peek_coefficients,
    peek_sums,
    publish_sums,
    reduce_sums,
    reference_gradient,
    row_values,
    total_gradient,
    wait_for_coefficients,
)
from steelyard.penalties.from_logits._triton_tiles import (
    R_LEVEL,
    R_TOP,
    SMALL_TILE,
    Z_LEVEL,
    Z_TOP,
    both_halves,
    clamped_log2,
    columns_of,
    load_tile,
    max_by_thread,
    peek,
    publish,
    store_tile,
    sum_by_thread,
    to_float32,
    wait_for,
    wait_for_all,
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
    no_mass = total == 0
    total = tl.where(no_mass, 1.0, total)
    return tl.log2(total), 1.0 / total, no_mass


@triton.jit
def combine_row(
    z_row, r_row, t_row, values, coefs, stats, rows, classes, pieces, row_scale, log2_scale,
    weights, limits, KINDS: tl.constexpr, COUNT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Combine the pieces of a row: store its values, publish the coefficients of its gradients.

    Only the program with the row's last piece calls this. It adds the pieces up in their order, so
    the result does not depend on which program was faster.

    Args:
        z_row: Pointer to the row's logits, `[classes]`.
        r_row: The same for the reference.
        t_row: Pointer to the row's target.
        values: Pointer to the row in `[COUNT + 1 or more, rows]`: the components, then the total.
        coefs: Pointer to the row's coefficients, `[COEFFICIENTS]`.
        stats: Pointer to the row's statistics, `[STATS, pieces]`, by all of its pieces.
        rows: Number of rows.
        classes: Length of a row.
        pieces: Number of pieces in a row.
        row_scale: Factor of the row.
        log2_scale: log2(e) / T.
        weights: Weights of the components, by kind.
        limits: Limits of the log ratios in nats, by kind.
        KINDS: Bit k is set if component kind k is computed.
        COUNT: Number of components.
        PIECES: `pieces`, rounded up to a power of 2.
    """
    COMPARES: tl.constexpr = (WITH_REFERENCE & KINDS) != 0
    piece = tl.arange(0, PIECES)
    valid = piece < pieces
    slot = stats + piece
    # Issue all loads at once, then wait for one after the other: the latencies overlap.
    tops_bits = peek(slot, valid)
    sums_bits = peek(slot + pieces, valid)
    place = slot + 2 * pieces
    if COMPARES:
        tops_r_bits = peek(place, valid)
        sums_r_bits = peek(place + pieces, valid)
        place_r = place
        place += 2 * pieces
    bits = peek_sums(place, valid, pieces, KINDS)
    top, offset, part = _tops(slot, valid, tops_bits)
    sums = wait_for_all(slot + pieces, valid, sums_bits)
    level, inv_sum, no_mass = _level(part, sums)
    publish(coefs + Z_TOP, top)
    publish(coefs + Z_LEVEL, level)
    of_z = (top, level, inv_sum, no_mass, part, sums, offset)
    of_r = of_z
    if COMPARES:
        top_r, offset_r, part_r = _tops(place_r, valid, tops_r_bits)
        sums_r = wait_for_all(place_r + pieces, valid, sums_r_bits)
        level_r, inv_sum_r, no_mass_r = _level(part_r, sums_r)
        publish(coefs + R_TOP, top_r)
        publish(coefs + R_LEVEL, level_r)
        of_r = (top_r, level_r, inv_sum_r, no_mass_r, part_r, sums_r, offset_r)
    total = row_values(
        z_row, r_row, t_row, values, coefs, place, bits, valid, of_z, of_r, rows, classes, pieces,
        row_scale, log2_scale, weights, limits, KINDS,
    )  # fmt: skip
    tl.store(values + COUNT * rows, row_scale * total)


@triton.jit
def _tiles(
    z, r, z_next, r_next, z_row, r_row, gz_row, gr_row, gram_piece, items, start, tiles, classes,
    target, grad_scale, log2_scale, softmax, row, weights, limits,
    KINDS: tl.constexpr, LIMITED: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr,
    GRAM: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Write the gradients of some tiles, given the row's coefficients.

    Args:
        z: First tile of the logits, loaded before the coefficients were waited for.
        r: The same of the reference.
        z_next: Second tile of the logits.
        r_next: The same of the reference.
        z_row: Pointer to the row's logits, `[classes]`.
        r_row: The same for the reference.
        gz_row: Pointer to the row of the gradient by the logits.
        gr_row: Pointer to the row of the gradient by the reference.
        gram_piece: Pointer to the piece in `[pairs, items]`.
        items: Rows times pieces.
        start: First class of the piece.
        tiles: Number of tiles in the piece.
        classes: Length of the row.
        target: The row's target, or -1.
        grad_scale: row_scale / T, the factor of all gradients.
        log2_scale: log2(e) / T.
        softmax: (shift, level) of the logits and of the reference.
        row: Coefficients of the row, by `wait_for_coefficients`.
        weights: Weights of the components, by kind.
        limits: Limits of the log ratios in nats, by kind.
        KINDS: Bit k is set if component kind k is computed.
        LIMITED: Whether a log ratio of the row may exceed the limit.
        GZ: Whether to write the gradient by the logits.
        GR: Whether to write the gradient by the reference.
        GRAM: Whether to write the inner products of the components' gradients.
        VECTOR: Elements in 16 bytes.
        PACKED: Whether 16-bit floats are loaded two to a word.
        UNROLL: Tiles in one turn of the loop.
    """
    COMPARES: tl.constexpr = (WITH_REFERENCE & KINDS) != 0
    TILE: tl.constexpr = 64 * VECTOR
    PLAIN: tl.constexpr = not (GRAM or LIMITED or GR)
    top, level, top_r, level_r = softmax
    products = new_products()
    bound = tl.minimum(start + tiles * TILE, classes)
    z_type: tl.constexpr = z_row.dtype.element_ty
    r_type: tl.constexpr = r_row.dtype.element_ty
    factors = linear_factors(row, top, level, level_r, grad_scale, weights, KINDS, PLAIN)
    half = factors[5]
    level_gap = factors[6]
    for first in range(0, tiles, UNROLL):
        for second in tl.static_range(UNROLL):
            here = start + (first + second) * TILE
            z_last = load_tile(z_row, here + 2 * TILE, bound, VECTOR, PACKED, "evict_first")
            r_last = z_last
            if COMPARES:
                r_last = load_tile(r_row, here + 2 * TILE, bound, VECTOR, PACKED, "evict_first")
            x = to_float32(z, z_type, VECTOR, PACKED)
            a = log_p(x, log2_scale, top, level, KINDS, PLAIN)
            p = tl.exp2(a)
            b = a
            q = p
            d = a
            if COMPARES:
                y = to_float32(r, r_type, VECTOR, PACKED)
                b = log_q(y, log2_scale, top_r, level_r, level_gap, KINDS, PLAIN)
                q = tl.exp2(b)
                d = a - b
            mean = log_mean(p, q, half, level, KINDS, PLAIN)
            if GRAM or LIMITED:
                is_target = both_halves(here + columns_of(VECTOR), VECTOR) == target
                gradients = component_gradients(
                    p, q, a, d, mean, is_target, row, top, level, limits, KINDS, LIMITED
                )
                if GZ:
                    total = tl.zeros_like(p)
                    for k in tl.static_range(KIND_COUNT):
                        if (KINDS >> k) & 1:
                            total = tl.fma(gradients[k], grad_scale * weights[k], total)
                    store_tile(gz_row, here, total, bound, VECTOR)
                if GRAM:
                    products = add_products(products, gradients, KINDS)
            elif GZ:
                total = total_gradient(
                    p, q, a, d, mean, here, target, factors, grad_scale, weights, KINDS, VECTOR
                )
                store_tile(gz_row, here, total, bound, VECTOR)
            if GR:
                by_reference = reference_gradient(
                    p, q, b, d, mean, row, weights, limits, KINDS, LIMITED
                )
                store_tile(gr_row, here, grad_scale * by_reference, bound, VECTOR)
            z = z_next
            r = r_next
            z_next = z_last
            r_next = r_last
    if GRAM:
        n = 0
        for i in tl.static_range(KIND_COUNT):
            for j in tl.static_range(i, KIND_COUNT):
                if (KINDS >> i) & (KINDS >> j) & 1:
                    # Pair (i, j), i <= j, of N kinds is at i (2 N - 1 - i) / 2 + j.
                    product = tl.sum(products[i * (2 * KIND_COUNT - 1 - i) // 2 + j], 0)
                    tl.store(gram_piece + n * items, product * (grad_scale * grad_scale))
                    n += 1


@triton.jit
def gradient_piece(
    z_row, r_row, t_row, gz_row, gr_row, gram_piece, coefs, items, piece, tiles, classes, row_scale,
    inv_temperature, log2_scale, weights, limits,
    KINDS: tl.constexpr, GZ: tl.constexpr, GR: tl.constexpr, GRAM: tl.constexpr,
    VECTOR: tl.constexpr, PACKED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Wait for the row's coefficients and write the gradients of one piece.

    Args:
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
        weights: Weights of the components, by kind.
        limits: Limits of the log ratios in nats, by kind.
        KINDS: Bit k is set if component kind k is computed.
        GZ: Whether to write the gradient by the logits.
        GR: Whether to write the gradient by the reference.
        GRAM: Whether to write the inner products of the components' gradients.
        VECTOR: Elements in 16 bytes.
        PACKED: Whether 16-bit floats are loaded two to a word.
        UNROLL: Tiles in one turn of the loop.
    """
    TILE: tl.constexpr = 64 * VECTOR
    COMPARES: tl.constexpr = (WITH_REFERENCE & KINDS) != 0
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
    if COMPARES:
        top_r_bits = tl.load(coefs + R_TOP, volatile=True)
        level_r_bits = tl.load(coefs + R_LEVEL, volatile=True)
    bits = peek_coefficients(coefs, top_bits, KINDS)
    target = -1
    if (WITH_TARGETS & KINDS) != 0:
        target = tl.load(t_row).to(tl.int32)
    top = wait_for(coefs + Z_TOP, top_bits)
    level = wait_for(coefs + Z_LEVEL, level_bits)
    top_r = top
    level_r = level
    if COMPARES:
        top_r = wait_for(coefs + R_TOP, top_r_bits)
        level_r = wait_for(coefs + R_LEVEL, level_r_bits)
    softmax = (top, level, top_r, level_r)
    row = wait_for_coefficients(coefs, bits, top, KINDS)
    grad_scale = row_scale * inv_temperature
    limited = False
    if (WITH_LIMIT & KINDS) != 0:
        limited = exceeds_limit(row)
    # Rare. Small tiles, so that this path does not raise the kernel's number of registers.
    if limited:
        _tiles(
            load_tile(z_row, start, bound, SMALL_TILE // 64, False, "evict_first"),
            load_tile(r_row, start, bound, SMALL_TILE // 64, False, "evict_first"),
            load_tile(z_row, start + SMALL_TILE, bound, SMALL_TILE // 64, False, "evict_first"),
            load_tile(r_row, start + SMALL_TILE, bound, SMALL_TILE // 64, False, "evict_first"),
            z_row, r_row, gz_row, gr_row, gram_piece, items, start, tiles * (TILE // SMALL_TILE),
            classes, target, grad_scale, log2_scale, softmax, row, weights, limits,
            KINDS, True, GZ, GR, GRAM, SMALL_TILE // 64, False, 1,
        )  # fmt: skip
    else:
        _tiles(
            z, r, z_next, r_next, z_row, r_row, gz_row, gr_row, gram_piece, items, start, tiles,
            classes, target, grad_scale, log2_scale, softmax, row, weights, limits,
            KINDS, False, GZ, GR, GRAM, VECTOR, PACKED, UNROLL,
        )  # fmt: skip
