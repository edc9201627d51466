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

# Places of a row's coefficients that all kinds share; those of single kinds follow them, in
# `_kernel_components`. Z_TOP is a shift m near the largest scaled logit x, and Z_LEVEL is
# log2(sum 2^(x - m)), so that log2 p = x - m - level; R_TOP and R_LEVEL are those of the reference.
Z_TOP, Z_LEVEL, R_TOP, R_LEVEL = (tl.constexpr(i) for i in range(4))
SHARED_COEFFICIENTS = 4


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
