"""Triton kernels of elementwise layers: root mean square norm, SwiGLU, rotary embeddings.

Each reads its inputs once and writes its outputs once, where the plain operations take five to ten
passes. Unlike others (Liger-Kernel's SwiGLU writes its gradients over the saved inputs), they never
write into tensors of the graph, so that several backward passes may go through it: each term has
its own. All arithmetic is in float32. Weights of norms are frozen: they get no gradient.

    norm      y = w x r,  r = 1 / sqrt(mean(x^2) + eps)
              dx = r (w dy - x r mean(w dy x r))
    SwiGLU    y = silu(a) b,  silu(a) = a s,  s = sigmoid(a)
              da = dy b s (1 + a (1 - s)),  db = dy silu(a)
    rotary    (y1, y2) = (x1 c1 - x2 s1, x2 c2 + x1 s2) for the halves of each head
              (dx1, dx2) = (dy1 c1 + dy2 s2, dy2 c2 - dy1 s1)
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048


@triton.jit
def _norm_kernel(x_ptr, w_ptr, y_ptr, r_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(x_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(x * x) / width + eps)
    tl.store(r_ptr + row, r)
    tl.store(y_ptr + row * width + at, w * (x * r), mask=mask)


@triton.jit
def _norm_backward_kernel(dy_ptr, x_ptr, w_ptr, r_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    dy = tl.load(dy_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * width + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.load(r_ptr + row)
    scaled = w * dy
    unit = x * r
    dx = r * (scaled - unit * (tl.sum(scaled * unit) / width))
    tl.store(dx_ptr + row * width + at, dx, mask=mask)


@triton.jit
def _swiglu_kernel(a_ptr, b_ptr, y_ptr, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < size
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, a * tl.sigmoid(a) * b, mask=mask)


@triton.jit
def _swiglu_backward_kernel(dy_ptr, a_ptr, b_ptr, da_ptr, db_ptr, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < size
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(da_ptr + at, dy * b * s * (1 + a * (1 - s)), mask=mask)
    tl.store(db_ptr + at, dy * a * s, mask=mask)


@triton.jit
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, heads, half,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token: `x` and `y` are `[tokens, heads, 2 half]`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (column < half)
    at = token * heads * 2 * half + head * 2 * half + column
    angle = token * 2 * half + column
    inside = column < half
    c1 = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cos_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sin_ptr + angle + half, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + at + half, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    tl.store(y_ptr + at, y1, mask=mask)
    tl.store(y_ptr + at + half, y2, mask=mask)


class RmsNorm(torch.autograd.Function):
    """`w x / sqrt(mean(x^2) + eps)` over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        width = x.shape[-1]
        y, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        block = triton.next_power_of_2(width)
        _norm_kernel[(inverse.numel(),)](
            x, weight, y, inverse, width, eps, BLOCK=block, num_warps=_warps(block)
        )
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        dx, width = torch.empty_like(x), x.shape[-1]
        block = triton.next_power_of_2(width)
        _norm_backward_kernel[(inverse.numel(),)](
            dy.contiguous(), x, weight, inverse, dx, width, BLOCK=block, num_warps=_warps(block)
        )
        return dx, None, None


class SwiGlu(torch.autograd.Function):
    """`silu(a) b`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        y = torch.empty_like(a)
        _swiglu_kernel[(triton.cdiv(a.numel(), _TILE),)](a, b, y, a.numel(), TILE=_TILE)
        ctx.save_for_backward(a, b)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        _swiglu_backward_kernel[(triton.cdiv(a.numel(), _TILE),)](
            dy.contiguous(), a, b, da, db, a.numel(), TILE=_TILE
        )
        return da, db


class Rotary(torch.autograd.Function):
    """`x cos + rotate_half(x) sin` of queries or keys `[1, heads, tokens, width]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, backward=True), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    # In memory a token's heads lie together: [tokens, heads, width].
    tokens = x[0].transpose(0, 1).contiguous()
    count, heads, width = tokens.shape
    y = torch.empty_like(tokens)
    _rotary_kernel[(count,)](
        tokens, cos, sin, y, heads, width // 2, BACKWARD=backward,
        HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(width // 2),
    )  # fmt: skip
    return y.transpose(0, 1)[None]


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
