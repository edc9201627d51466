"""Numbers passed between programs through global memory, without barriers or fences.

A number is its own flag: its place holds the bit pattern UNSET until it is written. A 32-bit
store is atomic, so a reader sees either UNSET or the whole number, and needs no separate flag
whose order relative to the number a fence would have to guarantee. Readers poll with volatile
loads, which bypass the L1 cache. `_launch.sweep` fills the workspace with UNSET.
"""

import triton
import triton.language as tl

# 0xFFFFFFFF, a NaN that arithmetic does not produce (NVIDIA's is 0x7FFFFFFF); see `publish`.
UNSET = tl.constexpr(-1)

# Places of a row's coefficients, which the second visit reads. Logarithms are to the base 2.
#   Z_TOP, Z_LEVEL   a shift m near the largest scaled logit x, and log2(sum 2^(x - m)), the level:
#                    log2 p = x - m - level
#   R_TOP, R_LEVEL   the same of the reference, for log2 q
#   H                entropy -sum p log2 p
#   K_F, MASS_F      forward KL: sum p * ratio, and the mass of p whose ratio is within the limit
#   K_R, MASS_R      reverse KL: the same by q
#   LIMIT_HIT        1.0 if some log ratio of the row may exceed the limit
#   K_P, K_Q         JS: sum p log2(p / m) and sum q log2(q / m), m = (p + q) / 2
Z_TOP, Z_LEVEL, R_TOP, R_LEVEL, H, K_F, MASS_F, K_R, MASS_R, LIMIT_HIT, K_P, K_Q = (
    tl.constexpr(i) for i in range(12)
)
COEFFICIENTS = tl.constexpr(12)


@triton.jit
def publish(place, x):
    """Store a number where other programs wait for it."""
    bits = x.to(tl.int32, bitcast=True)
    # An input may hold a NaN of exactly these bits; stored as it is, readers would wait forever.
    tl.store(place, tl.where(bits == UNSET, 0x7FC00000, bits))


@triton.jit
def wait_for(place, bits):
    """Number at `place`, polled until it is written; `bits` is what an earlier load found there."""
    while bits == UNSET:
        bits = tl.load(place, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def peek(place, valid):
    """Bits at `place` `[PIECES]`, UNSET or not; 0 for places that are not valid."""
    return tl.load(place, mask=valid, other=0, volatile=True)


@triton.jit
def wait_for_all(place, valid, bits):
    """Numbers at `place` `[PIECES]`, polled until all of them are written."""
    while tl.min(tl.abs(bits - UNSET), 0) == 0:
        bits = tl.load(place, mask=valid, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)
