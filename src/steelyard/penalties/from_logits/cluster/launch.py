"""Launch of the cluster kernel: the inputs that it supports, its outputs, and the grid."""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.penalties.from_logits._blockwise import Wants
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
from steelyard.penalties.from_logits.cluster.compiler import SWEEP, CompilerError, Variant, cubin
from steelyard.penalties.from_logits.cluster.driver import DriverError, Kernel
from steelyard.penalties.from_logits.cluster.finish import DTYPES, HOPPER, reduce_rows
from steelyard.penalties.from_logits.cluster.shape import VECTOR_BYTES, ClusterShape, shape_for

_LOG = logging.getLogger(__name__)
# Kinds with their part in `components.cuh`, which has the same numbers.
KERNEL_KINDS = (ENTROPY, FORWARD, REVERSE, JS, Z_LOSS, CROSS_ENTROPY)
ENABLED = os.environ.get("STEELYARD_CLUSTER_KERNEL") != "0"
_TEMPERATURES = (1e-3, 1e5)  # at which -1e35 stands for log 0 in bfloat16: `unpack_clamped`


class _Problem(ctypes.Structure):
    """`Problem` of `components.cuh`."""

    _fields_ = (
        # Of logits, reference, targets, scale, values, both gradients and the inner products.
        ("pointers", ctypes.c_void_p * 8),
        ("strides", ctypes.c_longlong * 4),  # of logits and reference, and of their gradients
        ("rows", ctypes.c_int),
        ("classes", ctypes.c_int),
        ("inverse_temperature", ctypes.c_float),
        ("weights", ctypes.c_float * len(KERNEL_KINDS)),
        ("limits", ctypes.c_float * len(KERNEL_KINDS)),
    )


class ClusterResult(NamedTuple):
    """A `SweepResult` whose inner products are still in parts, one of each warp.

    Attributes:
        values: As there, with one row for the weighted total.
        logits: As there.
        reference: As there.
        parts: `[pairs, warps]`, in float64: parts of the inner products; None if not wanted.
    """

    values: Tensor
    logits: Tensor | None
    reference: Tensor | None
    parts: Tensor | None

    @property
    def gram(self) -> Tensor | None:
        """Inner products `[components, components]`."""
        return None if self.parts is None else symmetric(self.parts.sum(1), len(self.values) - 1)

    def reduced(  # pragma: no cover  # by `make test-gpu`
        self, share: float
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Total, values and inner products over all rows in one launch; None if there is none."""
        return reduce_rows(self.values, self.parts, share)


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
) -> ClusterResult | None:
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
    by_logits = (torch.empty_like(logits) if into is None else into) if wants.logits else None
    by_reference = (
        torch.empty_like(reference) if wants.reference and reference is not None else None
    )
    matrices = (logits, reference, by_logits, by_reference)
    plan = _plan(
        logits.device.index,
        tuple(components),
        tuple(weights),
        logits.dtype,
        wants,
        classes,
        is_aligned(*matrices),
    )
    if plan is None:
        return None
    kernel, shape, template = plan
    clusters, count = min(kernel.clusters, rows), len(components)
    values = logits.new_empty((count + 1, rows), dtype=torch.float32)
    parts = None
    if wants.gram:
        warps = clusters * shape.cluster * shape.warps
        parts = logits.new_empty((count * (count + 1) // 2, warps), dtype=torch.float64)
    targets = None if targets is None else targets.long().contiguous()
    scale = None if scale is None else scale.float().contiguous()
    problem = _Problem.from_buffer_copy(template)
    problem.pointers[:] = [
        None if x is None else x.data_ptr()
        for x in (logits, reference, targets, scale, values, by_logits, by_reference, parts)
    ]
    problem.strides[:] = [0 if x is None else x.stride(0) for x in matrices]
    problem.rows = rows
    kernel.launch(clusters, problem)
    return ClusterResult(values, by_logits, by_reference, parts)


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


# Bounded: a weight that follows a schedule gives another key at every step.
@lru_cache(maxsize=1024)
def _plan(  # pragma: no cover  # by `make test-gpu`
    device: int,
    components: tuple[Component, ...],
    weights: tuple[float, ...],
    dtype: torch.dtype,
    wants: Wants,
    classes: int,
    aligned: bool,
) -> tuple[Kernel, ClusterShape, bytes] | None:
    """The kernel, its shape, and a `_Problem` without its tensors; None if there is no kernel."""
    kinds = sum(1 << each.kind for each in components)
    found = _kernel(device, kinds, dtype, wants, classes, aligned)
    if found is None:
        return None
    by_kind = dict(zip((each.kind for each in components), weights, strict=True))
    limits = {each.kind: each.limit for each in components}
    problem = _Problem(
        classes=classes,
        inverse_temperature=1.0 / components[0].temperature,
        weights=tuple(by_kind.get(kind, 0.0) for kind in KERNEL_KINDS),
        limits=tuple(limits.get(kind, math.inf) for kind in KERNEL_KINDS),
    )
    return *found, bytes(problem)


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
    if capability < HOPPER or shape is None:
        return None
    outputs = (wants.logits, wants.reference, wants.gram)
    own = (shape.cluster, shape.warps, shape.capacity, shape.slots, shape.min_blocks)
    variant = Variant(kinds, DTYPES[dtype], *outputs, aligned, *own)
    sizes = {"threads": shape.threads, "cluster": shape.cluster, "shared": shape.shared}
    try:
        with torch.cuda.device(device):
            code = cubin(SWEEP, variant.macros(), capability)
            return Kernel(code, "sweep", device, **sizes), shape
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
