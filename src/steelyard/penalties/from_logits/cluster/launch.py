"""Launch of the cluster kernel: the inputs that it supports, its outputs, and the grid."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from steelyard.penalties.from_logits._blockwise import SweepResult, Wants
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    ENTROPY,
    FORWARD,
    JS,
    REVERSE,
    Z_LOSS,
    Component,
)
from steelyard.penalties.from_logits.cluster.compiler import CompilerError, Variant, cubin
from steelyard.penalties.from_logits.cluster.driver import DriverError, Kernel
from steelyard.penalties.from_logits.cluster.shape import Shape, shape_for

_LOG = logging.getLogger(__name__)
KERNEL_KINDS = (ENTROPY, FORWARD, REVERSE, JS, Z_LOSS, CROSS_ENTROPY)
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_HOPPER = (9, 0)
_VECTOR = 16  # bytes


class _Problem(ctypes.Structure):
    """`Problem` of `components.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "reference", "targets", "scale")),
        *((name, ctypes.c_void_p) for name in ("values", "by_logits", "by_reference", "gram")),
        ("strides", ctypes.c_longlong * 4),
        ("rows", ctypes.c_int),
        ("classes", ctypes.c_int),
        ("inverse_temperature", ctypes.c_float),
        ("weights", ctypes.c_float * len(KERNEL_KINDS)),
        ("limits", ctypes.c_float * len(KERNEL_KINDS)),
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
    into: Tensor | None = None,
) -> SweepResult | None:
    """Compute what `_launch.sweep` computes, or return None if this kernel cannot.

    It needs a GPU with clusters (Hopper and newer), logits and reference of one dtype, and rows
    that fit into the shared memory of a cluster.

    Args:
        logits: `[rows, classes]`, with neighbouring classes.
        reference: The same shape and dtype, or None.
        targets: `[rows]`, or None.
        scale: `[rows]`, or None.
        components: Each kind once, in order, all at one temperature.
        weights: Weight of each component in the total.
        wants: Outputs to compute beside the values.
        into: Memory for the gradient by the logits; it may be the logits themselves.
    """
    kinds = [each.kind for each in components]
    if reference is not None and reference.dtype != logits.dtype:
        return None
    rows, classes = logits.shape
    device, size = logits.device, logits.element_size()
    by_logits = (torch.empty_like(logits) if into is None else into) if wants.logits else None
    by_reference = torch.empty_like(reference) if wants.reference else None  # type: ignore[arg-type]
    aligned = classes * size % _VECTOR == 0 and all(
        x is None or (x.data_ptr() | x.stride(0) * size) % _VECTOR == 0
        for x in (logits, reference, by_logits, by_reference)
    )
    found = _kernel(
        device.index, sum(1 << kind for kind in kinds), logits.dtype, wants, classes, aligned
    )
    if found is None:
        return None
    kernel, shape = found
    clusters = min(kernel.clusters, rows)
    values = torch.empty((len(kinds) + 1, rows), dtype=torch.float32, device=device)
    products = None
    if wants.gram:
        pairs, warps = len(kinds) * (len(kinds) + 1) // 2, shape.warps * shape.cluster
        products = torch.empty((pairs, clusters * warps), dtype=torch.float64, device=device)
    if targets is not None:
        targets = targets.long().contiguous()
    if scale is not None:
        scale = scale.float().contiguous()
    by_kind = [0.0] * len(KERNEL_KINDS)
    limits = [math.inf] * len(KERNEL_KINDS)
    for each, weight in zip(components, weights, strict=True):
        by_kind[each.kind], limits[each.kind] = weight, each.limit
    tensors = (logits, reference, targets, scale, values, by_logits, by_reference, products)
    strides = [_stride(x) for x in (logits, reference, by_logits, by_reference)]
    problem = _Problem(
        *[None if x is None else x.data_ptr() for x in tensors],
        (ctypes.c_longlong * 4)(*strides),
        rows,
        classes,
        1.0 / components[0].temperature,
        (ctypes.c_float * len(by_kind))(*by_kind),
        (ctypes.c_float * len(limits))(*limits),
    )
    with torch.cuda.device(device):
        kernel.launch(clusters, torch.cuda.current_stream(device).cuda_stream, problem)
    gram = None if products is None else _symmetric(products.sum(1), len(kinds))
    return SweepResult(values, by_logits, by_reference, gram)


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


@lru_cache(maxsize=1024)
def _kernel(
    device: int, kinds: int, dtype: torch.dtype, wants: Wants, classes: int, aligned: bool
) -> tuple[Kernel, Shape] | None:
    """The compiled kernel and its shape; None if there is none, which is logged once."""
    properties: Any = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < _HOPPER or dtype not in _DTYPES:
        return None
    vector = _VECTOR // dtype.itemsize
    vectors = -(-(classes + (0 if aligned else vector - 1)) // vector)
    compares = kinds & (1 << FORWARD | 1 << REVERSE | 1 << JS)
    shape = shape_for(
        vectors,
        2 if compares else 1,
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
    )
    if shape is None:
        return None
    variant = Variant(
        kinds,
        _DTYPES[dtype],
        wants.logits,
        wants.reference,
        wants.gram,
        aligned,
        shape.cluster,
        shape.warps,
        shape.capacity,
        shape.slots,
        shape.min_blocks,
    )
    try:
        with torch.cuda.device(device):
            kernel = Kernel(
                cubin(variant, (properties.major, properties.minor)),
                "sweep",
                device,
                cluster=shape.cluster,
                threads=shape.threads,
                shared=shape.shared,
            )
    except (CompilerError, DriverError, OSError) as error:
        _log_once(str(error))
        return None
    return kernel, shape


@cache
def _log_once(error: str) -> None:
    _LOG.warning("The cluster kernel is not used, Triton's is: %s", error)


def _symmetric(pairs: Tensor, count: int) -> Tensor:
    from steelyard.penalties.from_logits._launch import _places  # noqa: PLC0415

    return pairs[_places(count, pairs.device)]
