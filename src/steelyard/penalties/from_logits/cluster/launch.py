"""Launch of the cluster kernel: the inputs that it supports, its outputs, and the grid."""

from __future__ import annotations

import ctypes
import logging
import math
import os
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
    NEED_REFERENCE,
    REVERSE,
    Z_LOSS,
    Component,
)
from steelyard.penalties.from_logits.cluster.compiler import CompilerError, Variant, cubin
from steelyard.penalties.from_logits.cluster.driver import DriverError, Kernel
from steelyard.penalties.from_logits.cluster.shape import VECTOR_BYTES, ClusterShape, shape_for

_LOG = logging.getLogger(__name__)
# Kinds with their part in `components.cuh`, which has the same numbers.
KERNEL_KINDS = (ENTROPY, FORWARD, REVERSE, JS, Z_LOSS, CROSS_ENTROPY)
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# Off unless asked for: its last version has not passed the whole of `make test-gpu` yet.
ENABLED = os.environ.get("STEELYARD_CLUSTER_KERNEL") == "1"
_HOPPER = (9, 0)  # the first with clusters
_TEMPERATURES = (1e-3, 1e5)  # at which -1e35 stands for log 0 in bfloat16: `unpack_clamped`


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


def fits(logits: Tensor, reference: Tensor | None, components: Sequence[Component]) -> bool:
    """Return whether the kernel supports inputs that `_launch.fits` accepts.

    It also needs CUDA, one dtype, kinds that it knows and a usual temperature. Whether the GPU has
    clusters that hold a row is up to `sweep`.
    """
    low, high = _TEMPERATURES
    return (
        logits.is_cuda
        and (reference is None or reference.dtype == logits.dtype)
        and all(each.kind in KERNEL_KINDS for each in components)
        and low <= components[0].temperature <= high
    )


def sweep(  # pragma: no cover  # by `make test-gpu`
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
    """Compute what `_launch.sweep` computes, or return None if the GPU cannot.

    The GPU has to have clusters (Hopper and newer), and the shared memory of one to hold a row.

    Args:
        logits: `[rows, classes]`, with the classes of a row contiguous.
        reference: The same shape and dtype, or None.
        targets: `[rows]`, or None.
        scale: `[rows]`, or None.
        components: Each kind once, in order, all at one temperature.
        weights: Weight of each component in the total.
        wants: Outputs to compute beside the values.
        into: Memory for the gradient by the logits; it may be the logits themselves.
    """
    rows, classes = logits.shape
    device, count = logits.device, len(components)
    by_logits = (torch.empty_like(logits) if into is None else into) if wants.logits else None
    by_reference = (
        torch.empty_like(reference) if wants.reference and reference is not None else None
    )
    matrices = (logits, reference, by_logits, by_reference)
    kinds = sum(1 << each.kind for each in components)
    found = _kernel(device.index, kinds, logits.dtype, wants, classes, is_aligned(*matrices))
    if found is None:
        return None
    kernel, shape = found
    clusters = min(kernel.clusters, rows)
    values = torch.empty((count + 1, rows), dtype=torch.float32, device=device)
    gram = None
    if wants.gram:
        warps = clusters * shape.cluster * shape.warps
        pairs = count * (count + 1) // 2
        gram = torch.empty((pairs, warps), dtype=torch.float64, device=device)
    targets = None if targets is None else targets.long().contiguous()
    scale = None if scale is None else scale.float().contiguous()
    by_kind = dict(zip((each.kind for each in components), weights, strict=True))
    limits = {each.kind: each.limit for each in components}
    pointers = (logits, reference, targets, scale, values, by_logits, by_reference, gram)
    problem = _Problem(
        *(None if x is None else x.data_ptr() for x in pointers),
        tuple(0 if x is None else x.stride(0) for x in matrices),
        rows,
        classes,
        1.0 / components[0].temperature,
        tuple(by_kind.get(kind, 0.0) for kind in KERNEL_KINDS),
        tuple(limits.get(kind, math.inf) for kind in KERNEL_KINDS),
    )
    with torch.cuda.device(device):
        kernel.launch(clusters, torch.cuda.current_stream(device).cuda_stream, problem)
    products = None if gram is None else symmetric(gram.sum(1), count)
    return SweepResult(values, by_logits, by_reference, products)


def is_aligned(*matrices: Tensor | None) -> bool:
    """Return whether all rows begin and end at multiples of 16 bytes."""
    return all(
        x is None
        or (
            x.data_ptr() % VECTOR_BYTES == 0
            and x.stride(0) * x.element_size() % VECTOR_BYTES == 0
            and x.shape[1] * x.element_size() % VECTOR_BYTES == 0
        )
        for x in matrices
    )


@lru_cache(maxsize=1024)
def _kernel(  # pragma: no cover  # by `make test-gpu`
    device: int, kinds: int, dtype: torch.dtype, wants: Wants, classes: int, aligned: bool
) -> tuple[Kernel, ClusterShape] | None:
    """The compiled kernel and its shape; None if there is none, which is logged once."""
    properties: Any = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    inputs = 1 + any(kinds >> kind & 1 for kind in NEED_REFERENCE)
    shape = shape_for(
        classes,
        dtype.itemsize,
        inputs,
        aligned,
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
    )
    if capability < _HOPPER or shape is None:
        return None
    outputs = (wants.logits, wants.reference, wants.gram)
    own = (shape.cluster, shape.warps, shape.capacity, shape.slots, shape.min_blocks)
    variant = Variant(kinds, _DTYPES[dtype], *outputs, aligned, *own)
    try:
        with torch.cuda.device(device):
            code = cubin(variant, capability)
            return Kernel(code, device, shape.cluster, shape.threads, shape.shared), shape
    except (CompilerError, DriverError) as error:
        log_once(str(error))
        return None


@cache
def log_once(error: str) -> None:
    """Say why the kernel is not used."""
    _LOG.warning("Triton's kernel is used in place of the cluster kernel: %s", error)


def symmetric(pairs: Tensor, count: int) -> Tensor:
    """Symmetric matrix `[count, count]` of the pairs (0, 0), (0, 1), …, (1, 1), …."""
    return pairs[_places(count, pairs.device)]


@cache
def _places(count: int, device: torch.device) -> Tensor:
    """Index of the pair for each entry of the symmetric matrix, `[count, count]`."""
    places = torch.zeros(count, count, dtype=torch.int64)
    i, j = torch.triu_indices(count, count)
    places[i, j] = places[j, i] = torch.arange(len(i))
    return places.to(device)
