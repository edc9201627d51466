"""From the pieces of a row to its values and the coefficients of its gradients.

Piece i gives its shift m_i and `S_i = sum 2^(x - m_i)`. With `m = max m_i` and `w_i = 2^(m_i - m)`
the row's normalizer is `S = sum w_i S_i`, its level is `log2 S`, and `log2 p = x - m - level`.
Any other sum of a piece is corrected in the same way: `x - m = (x - m_i) + (m_i - m)`, so

    sum_row e * (x - m) = sum_i w_i * (moment_i + S_i * (m_i - m)).

The values follow from these sums (`_kernel_components.row_values`), except those of kinds that need
p and q themselves: a middle pass visits the pieces for them (`_kernel_components.middle_piece`).
"""

import triton
import triton.language as tl

from steelyard.penalties.from_logits._kernel_components import (
    WITH_REFERENCE,
    peek_sums,
    row_values,
)
from steelyard.penalties.from_logits._kernel_signals import (
    R_LEVEL,
    R_TOP,
    Z_LEVEL,
    Z_TOP,
    peek,
    publish,
    wait_for_all,
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
