"""Launch of the small kernels after a sweep: sums over rows, norms and cosines, upstream factor."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from steelyard.penalties.from_logits.cluster.compiler import FINISH, CompilerError, cubin
from steelyard.penalties.from_logits.cluster.driver import DriverError, Kernel
from steelyard.penalties.from_logits.cluster.shape import VECTOR_BYTES

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
    kernel = _kernel(values.device.index, "reduce_rows", torch.float32)
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
    kernel = _kernel(products.device.index, "compare_gradients", torch.float32)
    if kernel is None:
        return None
    named = terms - 1
    found = products.new_empty(terms + named * (named - 1) // 2)
    norms = _Norms(
        products.data_ptr(),
        found.data_ptr(),
        terms,
        components,
        tuple(share for row in shares for share in row),
    )
    kernel.launch(1, norms)
    return found.unbind()


def multiply(x: Tensor, factor: Tensor) -> bool:  # pragma: no cover  # by `make test-gpu`
    """Multiply a dense tensor in place by a scalar; return whether the kernel took it."""
    if factor.dtype != torch.float32 or x.data_ptr() % VECTOR_BYTES:
        return False
    kernel = _kernel(x.device.index, "multiply", x.dtype)
    if kernel is None:
        return False
    kernel.launch(_blocks(x.device.index), _Factor(x.data_ptr(), factor.data_ptr(), x.numel()))
    return True


@lru_cache(maxsize=64)
def _kernel(  # pragma: no cover  # by `make test-gpu`
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
