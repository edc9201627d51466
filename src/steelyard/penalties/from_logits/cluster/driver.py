"""The CUDA driver's functions that load and launch a kernel, called by `ctypes`.

torch offers no public way to launch a kernel with a cluster or with more than 48 kB of shared
memory. The driver's C interface is stable, and its library is there wherever a GPU is.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PORTABLE_CLUSTER = 8  # blocks: larger clusters need the attribute above
_NO_CONTEXT = (3, 201)  # CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_INVALID_CONTEXT


class DriverError(RuntimeError):
    """A function of the CUDA driver failed."""


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`, of a cluster."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _driver() -> Any:  # functions by name  # pragma: no cover  # by `make test-gpu`
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernel.argtypes = [
        ctypes.c_void_p,
        *[ctypes.c_uint] * 7,
        *[ctypes.c_void_p] * 3,
    ]
    return library


def _check(code: int) -> None:  # pragma: no cover  # by `make test-gpu`
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError((text.value or b"unknown error").decode())


def _enter_context(device: int) -> None:  # pragma: no cover  # by `make test-gpu`
    """Make the device's context current, the one of torch, if the thread has none yet."""
    driver, context = _driver(), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(driver.cuCtxSetCurrent(context))


class Kernel:  # pragma: no cover  # by `make test-gpu`
    """A loaded kernel with one cluster size, block size and amount of shared memory.

    Args:
        code: The cubin.
        name: The kernel's name in it.
        device: Index of the device, which has to be the current one.
        threads: Threads in a block.
        cluster: Blocks in a cluster, as compiled.
        shared: Bytes of dynamic shared memory in a block.

    Raises:
        DriverError: The kernel cannot be loaded, or no cluster of it fits on the GPU.
    """

    def __init__(
        self,
        code: bytes,
        name: str,
        device: int,
        *,
        threads: int,
        cluster: int = 1,
        shared: int = 0,
    ) -> None:
        driver, module = _driver(), ctypes.c_void_p()
        _enter_context(device)
        self._device, self._cluster, self._threads, self._shared = device, cluster, threads, shared
        self._function = ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), code))
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        _check(driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared))
        if cluster > _PORTABLE_CLUSTER:
            _check(driver.cuFuncSetAttribute(self._function, _NON_PORTABLE_CLUSTER, 1))
        self.clusters = self._clusters()

    def _clusters(self) -> int:
        """Clusters that the GPU runs at a time."""
        size = (ctypes.c_uint * 16)(self._cluster, 1, 1)
        attribute = _Attribute(_CLUSTER_DIMENSION, 0, size)
        one = (ctypes.c_uint * 3)(self._cluster, 1, 1)
        block = (ctypes.c_uint * 3)(self._threads, 1, 1)
        config = _Config(one, block, self._shared, None, ctypes.pointer(attribute), 1)
        count = ctypes.c_int()
        _check(
            _driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(count), self._function, ctypes.byref(config)
            )
        )
        if count.value == 0:
            raise DriverError(f"no cluster of {self._cluster} blocks fits on the GPU")
        return count.value

    def launch(self, clusters: int, argument: ctypes.Structure) -> None:
        """Launch on the current stream of the device."""
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.launch(clusters, argument)
        code = self._launch(clusters, argument)
        if code in _NO_CONTEXT:  # a new thread
            _enter_context(self._device)
            code = self._launch(clusters, argument)
        return _check(code)

    def _launch(self, clusters: int, argument: ctypes.Structure) -> int:
        # `current_stream` makes an object, which takes longer than the launch; Triton reads the
        # stream in this way too.
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # noqa: SLF001
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        code: int = _driver().cuLaunchKernel(
            self._function,
            clusters * self._cluster,
            1,
            1,
            self._threads,
            1,
            1,
            self._shared,
            stream,
            arguments,
            None,
        )
        return code
