"""Launching the kernels: which cases they take, the workspace, and the shape of the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations_with_replacement, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.penalties.from_logits._blockwise import Swept, Wants
from steelyard.penalties.from_logits._components import ENTROPY, FORWARD, JS, REVERSE, Component
from steelyard.penalties.from_logits._kernel_signals import COEFFICIENTS
from steelyard.penalties.from_logits._kernels import scale_kernel, sweep_kernel

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_NARROW = (torch.bfloat16, torch.float16)
_KINDS = 6


class Shape(NamedTuple):
    """How the work is cut.

    Attributes:
        tiles: Of 64 · 16 bytes make a piece of a row.
        programs: On a processor.
        registers: Of a thread, at most; None leaves it to the compiler.
        waits: Whether a program waits for the rest of its row and then has its piece at hand; else
            it goes on with others and comes back.
    """

    tiles: int
    programs: int
    registers: int | None = None
    waits: bool = True


def shape_for(kinds: Sequence[int], wants: Wants) -> Shape:
    """The shape that measured best on an H200, at 128256 classes of bfloat16."""
    if wants.gram:
        return Shape(16, 20, 128, waits=False)
    if JS in kinds:
        return Shape(16, 20, 96, waits=False)
    if FORWARD in kinds or REVERSE in kinds:
        return Shape(8, 20, None if wants.reference else 96)
    return Shape(8, 24)


def fits(logits: Tensor, reference: Tensor | None, components: Sequence[Component]) -> bool:
    """Whether the kernels take these inputs: each kind once, all at one temperature."""
    kinds = [each.kind for each in components]
    return (
        all(x is None or x.dtype in _FLOATS for x in (logits, reference))
        and logits.numel() > 0
        and all(a < b for a, b in pairwise(kinds))
        and len({each.temperature for each in components}) == 1
    )


def sweep(
    logits: Tensor,
    reference: Tensor | None,
    targets: Tensor | None,
    scale: Tensor | None,
    components: Sequence[Component],
    weights: Sequence[float],
    wants: Wants,
    *,
    shape: Shape | None = None,
    into: Tensor | None = None,
) -> Swept:
    """As `_sweep.sweep`, in one launch.

    Args:
        logits: `[rows, classes]`.
        reference: The same shape, or None.
        targets: `[rows]`, or None.
        scale: `[rows]`, or None.
        components: Each kind once, all at one temperature.
        weights: One for each.
        wants: What else to compute.
        shape: How to cut the work; None is what measured best.
        into: Where the gradient by the logits goes: the logits themselves, if it may.
    """
    z = _rows(logits)
    r = z if reference is None else _rows(reference)
    rows, classes = z.shape
    vector = 16 // z.element_size()
    kinds = [each.kind for each in components]
    shape = shape or shape_for(kinds, wants)
    tiles = min(shape.tiles, _cdiv(classes, 64 * vector))
    pieces = _cdiv(classes, 64 * vector * tiles)
    # The components' values, then the weighted total without JS, then what JS adds to it.
    made = z.new_empty((len(kinds) + 1 + (JS in kinds), rows), dtype=torch.float32)
    by_logits = (torch.empty_like(z) if into is None else into) if wants.logits else None
    by_reference = torch.empty_like(r) if wants.reference else None
    pairs = len(kinds) * (len(kinds) + 1) // 2
    products = z.new_empty((pairs, rows, pieces), dtype=torch.float32) if wants.gram else None
    statistics = _statistics(kinds)
    # Numbers that are not there yet: the tickets drawn, those of pieces, those of rows.
    size = 1 + rows * pieces * statistics
    shared = torch.full((size + rows * COEFFICIENTS.value,), -1, dtype=torch.int32, device=z.device)
    by_kind = dict(zip(kinds, weights, strict=True))
    limits = {each.kind: each.limit for each in components}
    processors = _processors(z.device)
    programs = min(processors * shape.programs, rows * pieces)
    # To wait is safe where all pieces of a row are sure to be in work at the same time.
    lag = 0 if shape.waits and pieces <= processors else programs + 2 * pieces
    sweep_kernel[(programs,)](
        z, r, _or(targets, shared), _or(scale, made), made, _or(by_logits, z),
        _or(by_reference, r), _or(products, made), shared[1:], shared[size:], shared,
        rows, classes, pieces, tiles, lag,
        z.stride(0), r.stride(0), _or(by_logits, z).stride(0), _or(by_reference, r).stride(0),
        1.0 / components[0].temperature, *(by_kind.get(kind, 0.0) for kind in range(_KINDS)),
        limits.get(FORWARD, math.inf), limits.get(REVERSE, math.inf),
        KINDS=sum(1 << kind for kind in kinds), COUNT=len(kinds),
        SCALED=scale is not None, GZ=wants.logits, GR=wants.reference, GRAM=wants.gram,
        STATS=statistics, PAIRS=pairs, VECTOR=vector, PACKED=_is_packed(z, r),
        PIECES=1 << (pieces - 1).bit_length(), num_warps=1, enable_fp_fusion=True,
        maxnreg=shape.registers,
    )  # fmt: skip
    gram = None if products is None else _gram(products, len(kinds))
    return Swept(made, by_logits, by_reference, gram)


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiply a dense tensor in place by a number on its device, without waiting for it."""
    tile = 4096
    programs = min(_cdiv(x.numel(), tile), 8 * _processors(x.device))
    scale_kernel[(programs,)](x, factor, x.numel(), TILE=tile)


def _cdiv(a: int, b: int) -> int:
    """Triton has it, as a function that its compiler knows too, at 20 µs a call."""
    return -(-a // b)


def _statistics(kinds: Sequence[int]) -> int:
    """How many numbers a piece hands on."""
    compares = any(kind in kinds for kind in (FORWARD, REVERSE, JS))
    ratios = sum(kind in kinds for kind in (FORWARD, REVERSE))
    own = 2 + (ENTROPY in kinds) + 2 * compares
    return own + ratios + (ratios > 0) + 2 * (JS in kinds)


def _gram(products: Tensor, count: int) -> Tensor:
    """The symmetric matrix of inner products, from those of each piece."""
    return products.sum((1, 2), dtype=torch.float64)[_places(count, products.device)]


@cache
def _places(count: int, device: torch.device) -> Tensor:
    """Which pair each place of the symmetric matrix holds."""
    pairs = list(combinations_with_replacement(range(count), 2))
    return torch.tensor(
        [[pairs.index((min(i, j), max(i, j))) for j in range(count)] for i in range(count)],
        device=device,
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_packed(z: Tensor, r: Tensor) -> bool:
    """Whether both hold narrow floats that pair up in words."""
    return all(
        x.dtype in _NARROW and (x.shape[1] | x.stride(0)) % 2 == 0 and x.data_ptr() % 4 == 0
        for x in (z, r)
    )


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer has to be there, even where nothing is read."""
    return other if x is None else x


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # the interpreter
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
