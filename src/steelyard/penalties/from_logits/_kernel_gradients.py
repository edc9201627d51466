"""Second visit to a piece of a row: the gradients and their inner products.

The formulas are in `_kernel_components`. There are two ways through a tile. As a rule (PLAIN) the
weighted total of all gradients by the logits is one expression, linear in a few functions of the
class, whose factors are computed once a row. If single gradients are needed, for inner products or
since a log ratio of the row exceeds the limit, they are computed one by one and then added up.
"""

import triton
import triton.language as tl

from steelyard.penalties.from_logits._kernel_components import (
    KIND_COUNT,
    WITH_LIMIT,
    WITH_REFERENCE,
    WITH_TARGETS,
    add_products,
    component_gradients,
    exceeds_limit,
    linear_factors,
    log_mean,
    log_p,
    log_q,
    new_products,
    peek_coefficients,
    reference_gradient,
    total_gradient,
    wait_for_coefficients,
)
from steelyard.penalties.from_logits._kernel_signals import (
    R_LEVEL,
    R_TOP,
    Z_LEVEL,
    Z_TOP,
    wait_for,
)
from steelyard.penalties.from_logits._kernel_tiles import (
    SMALL_TILE,
    both_halves,
    columns_of,
    load_tile,
    store_tile,
    to_float32,
)


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
