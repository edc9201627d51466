"""Launch of the cluster kernel: supported inputs, a row among blocks, sums after a sweep."""

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
from steelyard.penalties.from_logits._formulas import Wants
from steelyard.penalties.from_logits.cluster.cuda_kernel import (
    FINISH,
    SWEEP,
    CompilerError,
    DriverError,
    Kernel,
    Variant,
    cubin,
)

VECTOR_BYTES = 16  # of the widest load
# Blocks in a cluster, and rows that a block holds its part of at a time; the first that fit. More
# than 8 blocks are not portable; H100 and H200 have 16. Other sizes fill a GPU less well: clusters
# of 3 cover 117 of an H200's 132 multiprocessors, those of 2 all, so two slots are better there.
_CANDIDATES = ((1, 3), (2, 3), (2, 2), (4, 3), (8, 3), (16, 3), (16, 2))
# Warps in a block. More merge more, fewer hide less of each other's waiting; among these, those
# that divide the vectors most evenly.
_WARPS = (12, 13, 14, 15, 16, 20)
_RESIDENT = 16  # warps on a multiprocessor, if blocks are small
_SCHEDULERS = 4  # of a multiprocessor; each runs a quarter of the warps
_RESERVED = 1024  # bytes of shared memory that CUDA takes for each block


class ClusterShape(NamedTuple):
    """Division of a row, and the blocks that a multiprocessor runs.

    Attributes:
        cluster: Blocks in a cluster, which hold one row.
        warps: Warps in a block that compute; one more merges.
        slots: Rows of which a block holds its part at a time.
        capacity: Vectors of 16 bytes in a slot, for each input.
        min_blocks: Blocks on a multiprocessor that the registers have to allow.
        shared: Bytes of dynamic shared memory in a block.
    """

    cluster: int
    warps: int
    slots: int
    capacity: int
    min_blocks: int
    shared: int

    @property
    def threads(self) -> int:
        """Threads of a block, those that merge included."""
        return 32 * (self.warps + 1)


def shape_for(
    classes: int,
    itemsize: int,
    inputs: int,
    aligned: bool,
    per_block: int,
    per_multiprocessor: int,
) -> ClusterShape | None:
    """The first candidate whose shared memory holds rows; None if no cluster does.

    Args:
        classes: Length of a row.
        itemsize: Bytes of an element.
        inputs: 2 with a reference, else 1.
        aligned: Whether rows begin and end at multiples of 16 bytes.
        per_block: Most bytes of shared memory in a block.
        per_multiprocessor: Bytes of shared memory in a multiprocessor.
    """
    vector = VECTOR_BYTES // itemsize
    vectors = -(-(classes + (0 if aligned else vector - 1)) // vector)
    for cluster, slots in _CANDIDATES:
        capacity = -(-vectors // cluster)
        warps = _warps(capacity)
        dynamic = slots * inputs * capacity * VECTOR_BYTES
        needed = dynamic + _static(cluster, warps)
        if needed <= per_block:
            blocks = per_multiprocessor // (needed + _RESERVED)
            min_blocks = max(1, min(blocks, _RESIDENT // (warps + 1)))
            return ClusterShape(cluster, warps, slots, capacity, min_blocks, dynamic)
    return None


def _warps(capacity: int) -> int:
    """Warps for a block's vectors; for short rows so few that a thread has a few vectors.

    All wait for the scheduler that has the most to do: its warps times the vectors of a thread.
    """
    most = min(_WARPS[-1], capacity // 64)
    if most < _WARPS[0]:
        return max(1, most)
    return min(
        (warps for warps in _WARPS if warps <= most),
        key=lambda warps: -(-capacity // (32 * warps)) * -(-warps // _SCHEDULERS),
    )


def _static(cluster: int, warps: int) -> int:
    """Most bytes of the kernel's `Shared`: parts of warps and blocks, rows and barriers."""
    return 2 * 32 * (warps + cluster) + 1024


HOPPER = (9, 0)  # the first with clusters
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MAX_TERMS, MAX_COMPONENTS = 16, 6  # as `finish.cu` has them
_THREADS = {"reduce_rows": 256, "compare_gradients": MAX_TERMS * MAX_TERMS, "multiply": 512}


class _Totals(ctypes.Structure):
    """`Totals` of `finish.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("values", "gram", "total", "reduced", "products")),
        ("share", ctypes.c_double),
        ("rows", ctypes.c_int),
        ("components", ctypes.c_int),
        ("parts", ctypes.c_int),
    )


class _Norms(ctypes.Structure):
    """`Norms` of `finish.cu`."""

    _fields_ = (
        ("products", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("terms", ctypes.c_int),
        ("components", ctypes.c_int),
        ("shares", ctypes.c_double * (MAX_TERMS * MAX_COMPONENTS)),
    )


class _Factor(ctypes.Structure):
    """`Factor` of `finish.cu`."""

    _fields_ = (("x", ctypes.c_void_p), ("factor", ctypes.c_void_p), ("size", ctypes.c_longlong))


def reduce_rows(  # pragma: no cover  # by `make test-gpu`
    values: Tensor, parts: Tensor | None, share: float
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Total, values of the components and Gram matrix, over all rows; None without the kernel.

    Args:
        values: `[components + 1, rows]`; last, the weighted total.
        parts: `[pairs, parts]`: parts of the inner products, in float64; or None.
        share: Factor of the values; the inner products have its square.
    """
    kernel = _finish_kernel(values.device.index, "reduce_rows", torch.float32)
    if kernel is None:
        return None
    count, rows = values.shape[0] - 1, values.shape[1]
    total, reduced = values.new_empty(()), values.new_empty(count)
    products, pairs = None, 0
    if parts is not None:
        products, pairs = parts.new_empty((count, count)), parts.shape[0]
    totals = _Totals(
        values.data_ptr(),
        None if parts is None else parts.data_ptr(),
        total.data_ptr(),
        reduced.data_ptr(),
        None if products is None else products.data_ptr(),
        share,
        rows,
        count,
        0 if parts is None else parts.shape[1],
    )
    kernel.launch(count + 1 + pairs, totals)
    return total, reduced, products


def compare_gradients(  # pragma: no cover  # by `make test-gpu`
    products: Tensor, shares: Sequence[Sequence[float]]
) -> tuple[Tensor, ...] | None:
    """Norms of the terms, then the cosines of all pairs; None if the kernel does not take them.

    Args:
        products: `[components, components]`: the Gram matrix, in float64.
        shares: `[terms, components]`; the last term is the weighted total, which has no cosines.
    """
    terms, components = len(shares), len(shares[0])
    if terms > MAX_TERMS or components > MAX_COMPONENTS or not products.is_contiguous():
        return None
    kernel = _finish_kernel(products.device.index, "compare_gradients", torch.float32)
    if kernel is None:
        return None
    named = terms - 1
    numbers = products.new_empty(terms + named * (named - 1) // 2)
    norms = _Norms(
        products.data_ptr(),
        numbers.data_ptr(),
        terms,
        components,
        tuple(share for row in shares for share in row),
    )
    kernel.launch(1, norms)
    return numbers.unbind()


def multiply(x: Tensor, factor: Tensor) -> bool:  # pragma: no cover  # by `make test-gpu`
    """Multiply a dense tensor in place by a scalar; return whether the kernel took it."""
    if factor.dtype != torch.float32 or x.data_ptr() % VECTOR_BYTES:
        return False
    kernel = _finish_kernel(x.device.index, "multiply", x.dtype)
    if kernel is None:
        return False
    kernel.launch(_blocks(x.device.index), _Factor(x.data_ptr(), factor.data_ptr(), x.numel()))
    return True


@lru_cache(maxsize=64)
def _finish_kernel(  # pragma: no cover  # by `make test-gpu`
    device: int, name: str, dtype: torch.dtype
) -> Kernel | None:
    """A kernel of `finish.cu`; None if the GPU has none, which a sweep has logged."""
    capability = torch.cuda.get_device_capability(device)
    if capability < HOPPER:
        return None
    macros = [f"-DDTYPE={DTYPES[dtype]}", "-DCLUSTER=1", "-DWARPS=1"]
    try:
        with torch.cuda.device(device):
            code = cubin(FINISH, macros, capability)
            return Kernel(code, name, device, threads=_THREADS[name])
    except (CompilerError, DriverError):
        return None


@lru_cache(maxsize=64)
def _blocks(device: int) -> int:  # pragma: no cover  # by `make test-gpu`
    properties: Any = torch.cuda.get_device_properties(device)
    return 2 * int(properties.multi_processor_count)


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
    """Return whether the kernel supports inputs that `_triton_sweep.fits` accepts.

    It also needs CUDA, one dtype, kinds that it knows and a usual temperature. Whether the GPU has
    clusters that hold a row is up to `sweep`.
    """
    low, high = _TEMPERATURES
    return (
        logits.is_cuda
        and (reference is None or reference.dtype == logits.dtype)
        and all(component.kind in KERNEL_KINDS for component in components)
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
    """Compute what `_triton_sweep.sweep` computes, or return None if the GPU cannot.

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
    kinds = sum(1 << component.kind for component in components)
    kernel = _sweep_kernel(device, kinds, dtype, wants, classes, aligned)
    if kernel is None:
        return None
    by_kind = dict(zip((component.kind for component in components), weights, strict=True))
    limits = {component.kind: component.limit for component in components}
    problem = _Problem(
        classes=classes,
        inverse_temperature=1.0 / components[0].temperature,
        weights=tuple(by_kind.get(kind, 0.0) for kind in KERNEL_KINDS),
        limits=tuple(limits.get(kind, math.inf) for kind in KERNEL_KINDS),
    )
    return *kernel, bytes(problem)


@lru_cache(maxsize=1024)
def _sweep_kernel(  # pragma: no cover  # by `make test-gpu`
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
