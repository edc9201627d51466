"""Tiles of classes in a kernel: a warp loads, unpacks, sums and stores them.

A tile is `[32, VECTOR, 2]`: 32 threads, with VECTOR neighbouring classes each, twice. VECTOR
elements are 16 bytes, the widest load of a thread, so a tile is `64 * VECTOR` classes (512 in
bfloat16, 256 in float32), read by two loads that each cover 512 contiguous bytes of the row.

Logarithms are to the base 2: the hardware has `ex2` and `lg2`, and a natural exponential would
multiply by log2(e) first. `clamped_log2(x, log2_scale, top)` folds that factor, the temperature
and the shift by the maximum into one fused multiply-add. Factors LN2 turn results to nats.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG_ZERO = tl.constexpr(-1e30)  # stands for log 0, as in `divergences`: 0 * LOG_ZERO is 0, not NaN
HUGE = tl.constexpr(1e29)  # a log ratio above it has LOG_ZERO on one side
TINY = tl.constexpr(1e-37)  # smallest argument of `log2`, which flushes subnormal numbers to 0
SMALL_TILE = tl.constexpr(256)  # classes at a time on rare paths, which must not cost registers
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def log2(x):
    """Logarithm by one instruction; libdevice's takes 25, and JS needs one for every class."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log2_offset(x, log2_scale, top):
    """`x * log2(e) / T - top`: logits in units of log 2, relative to `top`."""
    return tl.fma(x, log2_scale, -top)


@triton.jit
def clamped_log2(x, log2_scale, top):
    """`log2_offset`, at least LOG_ZERO: its product with probability 0 is 0. NaN stays NaN."""
    return tl.maximum(log2_offset(x, log2_scale, top), LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def limit_ratio(p, d, limit):
    """Log ratio `d` clamped to ±limit, 0 where p = 0; and 1.0 where it passes a gradient."""
    # LOG_ZERO on the other side is log 0: without a limit the ratio is infinite.
    ratio = tl.where(d > HUGE, float("inf"), d)
    ratio = tl.minimum(tl.maximum(ratio, -limit), limit)
    inside = tl.where(tl.abs(d) <= limit, 1.0, 0.0)
    return tl.where(p == 0, 0.0, ratio), inside


@triton.jit
def columns_of(VECTOR: tl.constexpr):
    """Columns of a tile's first half, `[32, VECTOR]`; `both_halves` gives all of them."""
    return tl.arange(0, 32)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def both_halves(first, VECTOR: tl.constexpr):
    return tl.join(first, first + 32 * VECTOR)


@triton.jit
def load_tile(row, start, bound, VECTOR: tl.constexpr, PACKED: tl.constexpr, POLICY: tl.constexpr):
    """Load a tile as it is in memory; classes at or after `bound` are -inf.

    PACKED tiles of 16-bit floats stay two to a 32-bit word, `[32, VECTOR / 2, 2]`: the tiles that
    are loaded ahead then take half the registers.
    """
    if PACKED:
        words = row.to(tl.pointer_type(tl.int32), bitcast=True) + start // 2
        half: tl.constexpr = VECTOR // 2
        at = columns_of(half)
        # Two -inf in one word: 0xFF80FF80 in bfloat16, 0xFC00FC00 in float16.
        neg_inf = -8323200 if row.dtype.element_ty == tl.bfloat16 else -67044352
        left = (bound - start) // 2
        a = tl.load(words + at, mask=at < left, other=neg_inf, eviction_policy=POLICY)
        at += 32 * half
        b = tl.load(words + at, mask=at < left, other=neg_inf, eviction_policy=POLICY)
    else:
        at = start + columns_of(VECTOR)
        a = tl.load(row + at, mask=at < bound, other=float("-inf"), eviction_policy=POLICY)
        at += 32 * VECTOR
        b = tl.load(row + at, mask=at < bound, other=float("-inf"), eviction_policy=POLICY)
    return tl.join(a, b)


@triton.jit
def _unpack_words(word, KIND: tl.constexpr, VECTOR: tl.constexpr):
    if KIND == tl.bfloat16:
        # bfloat16 is the upper half of float32, so unpacking is a shift or a mask.
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(low, high), [32, VECTOR])


@triton.jit
def to_float32(raw, KIND: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr):
    if PACKED:
        a, b = tl.split(raw)
        tile = tl.join(_unpack_words(a, KIND, VECTOR), _unpack_words(b, KIND, VECTOR))
    else:
        tile = raw.to(tl.float32)
    return tile


@triton.jit
def store_tile(row, start, x, bound, VECTOR: tl.constexpr):
    a, b = tl.split(x.to(row.dtype.element_ty))
    at = start + columns_of(VECTOR)
    tl.store(row + at, a, mask=at < bound)
    at += 32 * VECTOR
    tl.store(row + at, b, mask=at < bound)


@triton.jit
def sum_by_thread(x):
    """Sum over a tile within each thread: `[32, VECTOR, 2]` to `[32]`, without communication."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def max_by_thread(x):
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def dot_by_thread(partial, a, b):
    """Add each thread's inner product over a tile to `partial`, `[32]`.

    Splitting down to single elements makes a chain of fused multiply-adds, one instruction an
    element; `tl.sum(a * b)` would first keep all products in registers.
    """
    VECTOR: tl.constexpr = a.shape[1]
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    partial = _dot(partial, a0, b0, VECTOR)
    return _dot(partial, a1, b1, VECTOR)


@triton.jit
def _dot(partial, a, b, COUNT: tl.constexpr):
    if COUNT == 1:
        partial = tl.fma(tl.reshape(a, [32]), tl.reshape(b, [32]), partial)
    else:
        a0, a1 = tl.split(tl.reshape(a, [32, COUNT // 2, 2]))
        b0, b1 = tl.split(tl.reshape(b, [32, COUNT // 2, 2]))
        partial = _dot(partial, a0, b0, COUNT // 2)
        partial = _dot(partial, a1, b1, COUNT // 2)
    return partial


# 0xFFFFFFFF, a NaN that arithmetic does not produce (NVIDIA's is 0x7FFFFFFF); see `publish`.
UNSET = tl.constexpr(-1)

# Places of a row's coefficients that all kinds share; those of single kinds follow them, in
# `_triton_components`. Z_TOP is a shift m near the largest scaled logit x, and Z_LEVEL is
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
