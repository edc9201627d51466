"""Tiles of classes in a kernel: a warp loads, unpacks, sums and stores them."""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG_ZERO = tl.constexpr(-1e30)  # stands for log 0, as in `divergences`
HUGE = tl.constexpr(1e29)
TINY = tl.constexpr(1e-37)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def log2(x):
    """Fast, where libdevice's takes 25 instructions: it is needed for every class of JS."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def offsets(x, unit, top):
    """Logits to the base 2 relative to `top`."""
    return tl.fma(x, unit, -top)


@triton.jit
def logs(x, unit, top):
    """The same, at least LOG_ZERO, so that a product with 0 is 0; NaN stays."""
    return tl.maximum(offsets(x, unit, top), LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def within(p, d, limit):
    """What the limit leaves of a log ratio, and where it passes a gradient."""
    ratio = tl.where(d > HUGE, float("inf"), d)  # log 0 on the other side
    ratio = tl.minimum(tl.maximum(ratio, -limit), limit)
    inside = tl.where(tl.abs(d) <= limit, 1.0, 0.0)
    return tl.where(p == 0, 0.0, ratio), inside


@triton.jit
def columns_of(VECTOR: tl.constexpr):
    """The classes of a tile's first half: VECTOR in a row for each thread; `_both` gives all."""
    return tl.arange(0, 32)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def halves(first, VECTOR: tl.constexpr):
    return tl.join(first, first + 32 * VECTOR)


@triton.jit
def load_tile(row, start, bound, VECTOR: tl.constexpr, PACKED: tl.constexpr, POLICY: tl.constexpr):
    """A tile as it is in memory; narrow floats two to a word, to take few registers."""
    if PACKED:
        words = row.to(tl.pointer_type(tl.int32), bitcast=True) + start // 2
        half: tl.constexpr = VECTOR // 2
        at = columns_of(half)
        # Two times -inf, of either kind.
        nothing = -8323200 if row.dtype.element_ty == tl.bfloat16 else -67044352
        left = (bound - start) // 2
        a = tl.load(words + at, mask=at < left, other=nothing, eviction_policy=POLICY)
        at += 32 * half
        b = tl.load(words + at, mask=at < left, other=nothing, eviction_policy=POLICY)
    else:
        at = start + columns_of(VECTOR)
        a = tl.load(row + at, mask=at < bound, other=float("-inf"), eviction_policy=POLICY)
        at += 32 * VECTOR
        b = tl.load(row + at, mask=at < bound, other=float("-inf"), eviction_policy=POLICY)
    return tl.join(a, b)


@triton.jit
def _word(word, KIND: tl.constexpr, VECTOR: tl.constexpr):
    if KIND == tl.bfloat16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(low, high), [32, VECTOR])


@triton.jit
def floats(raw, KIND: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr):
    if PACKED:
        a, b = tl.split(raw)
        tile = tl.join(_word(a, KIND, VECTOR), _word(b, KIND, VECTOR))
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
def by_thread(x):
    """Each thread's sum over a tile."""
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def most_by_thread(x):
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def dot_by_thread(so_far, a, b):
    """Each thread's inner product over a tile: one instruction an element, and few registers."""
    VECTOR: tl.constexpr = a.shape[1]
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    so_far = _dot(so_far, a0, b0, VECTOR)
    return _dot(so_far, a1, b1, VECTOR)


@triton.jit
def _dot(so_far, a, b, COUNT: tl.constexpr):
    if COUNT == 1:
        so_far = tl.fma(tl.reshape(a, [32]), tl.reshape(b, [32]), so_far)
    else:
        a0, a1 = tl.split(tl.reshape(a, [32, COUNT // 2, 2]))
        b0, b1 = tl.split(tl.reshape(b, [32, COUNT // 2, 2]))
        so_far = _dot(so_far, a0, b0, COUNT // 2)
        so_far = _dot(so_far, a1, b1, COUNT // 2)
    return so_far
