"""A CUDA kernel: compiled at run time by NVRTC, cached on disk, launched through the driver."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

from steelyard.output.run_files import write_atomic

# Programs, as the files that they consist of.
SWEEP = ("primitives.cuh", "components.cuh", "sweep.cu")
FINISH = ("primitives.cuh", "finish.cu")


class Variant(NamedTuple):
    """Parameters that a sweep is compiled for: the macros of its source.

    Attributes:
        kinds: Bit k is set if component kind k is computed.
        dtype: 0 bfloat16, 1 float16, 2 float32.
        gz: Whether to write the gradient by the logits.
        gr: Whether to write the gradient by the reference.
        gram: Whether to write the inner products of the components' gradients.
        aligned: Whether all rows begin and end at multiples of 16 bytes.
        cluster: Blocks in a cluster.
        warps: Warps in a block, without the one that merges.
        capacity: Vectors of 16 bytes in a slot, for each input.
        slots: Rows of which a block holds its part at a time.
        min_blocks: Blocks that should fit on a multiprocessor; limits the registers of a thread.
    """

    kinds: int
    dtype: int
    gz: bool
    gr: bool
    gram: bool
    aligned: bool
    cluster: int
    warps: int
    capacity: int
    slots: int
    min_blocks: int

    def macros(self) -> list[str]:
        """Options that define the macros."""
        return [f"-D{name.upper()}={int(value)}" for name, value in self._asdict().items()]


class CompilerError(RuntimeError):
    """NVRTC is not there, or did not compile the kernel."""


def cubin(program: tuple[str, ...], macros: Sequence[str], capability: tuple[int, int]) -> bytes:
    """Machine code of a program for GPUs of one compute capability, from the cache if it is there.

    Raises:
        CompilerError: NVRTC is not there, or did not compile it.
    """
    path = cache_folder() / _file_name(program, macros, capability)
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = _compile(_source(program), _options(macros, capability))
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, code)
    return code


def _options(macros: Sequence[str], capability: tuple[int, int]) -> list[str]:
    major, minor = capability
    return ["-std=c++17", f"--gpu-architecture=sm_{major}{minor}", *macros]


def _file_name(program: tuple[str, ...], macros: Sequence[str], capability: tuple[int, int]) -> str:
    """Name in the cache: another source, variant, GPU or CUDA gives another."""
    parts = (_source(program), _options(macros, capability), torch.version.cuda)
    return f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.cubin"


def cache_folder() -> Path:
    """Folder of compiled kernels: in `$STEELYARD_CACHE`, else in the user's cache folder."""
    chosen = os.environ.get("STEELYARD_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "steelyard" / "kernels"


@cache
def _source(program: tuple[str, ...]) -> str:
    folder = files(__package__ or __name__.rpartition(".")[0])
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in program)


@cache
def _nvrtc() -> ctypes.CDLL:
    """The library, which torch has loaded or the system has, or else as a package of NVIDIA's.

    Raises:
        CompilerError: It cannot be loaded.
    """
    name = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib  # noqa: PLC0415  # no dependency

            library = load_nvidia_dynamic_lib("nvrtc")  # pragma: no cover  # by `make test-gpu`
            return ctypes.CDLL(library.abs_path)  # pragma: no cover
        except Exception:  # noqa: BLE001  # whatever a package that we do not depend on raises
            raise CompilerError(f"{name} cannot be loaded: {error}") from error


def _compile(source: str, options: list[str]) -> bytes:
    return _run_compiler(_nvrtc(), source, options)


def _run_compiler(  # pragma: no cover  # by `make test-gpu`
    nvrtc: ctypes.CDLL, source: str, options: list[str]
) -> bytes:
    program, text = ctypes.c_void_p(), source.encode()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"sweep.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given) != 0:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CompilerError(f"NVRTC did not compile the kernel: {log}")
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(  # pragma: no cover  # by `make test-gpu`
    nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str
) -> bytes:
    size = ctypes.c_size_t()
    _check_nvrtc(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check_nvrtc(getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text.raw


def _check_nvrtc(code: int) -> None:  # pragma: no cover  # by `make test-gpu`
    if code != 0:
        raise CompilerError(f"NVRTC failed with error {code}.")


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


def _check_driver(code: int) -> None:  # pragma: no cover  # by `make test-gpu`
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError((text.value or b"unknown error").decode())


def _enter_context(device: int) -> None:  # pragma: no cover  # by `make test-gpu`
    """Make the device's context current, the one of torch, if the thread has none yet."""
    driver, context = _driver(), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        _check_driver(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check_driver(driver.cuCtxSetCurrent(context))


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
        _check_driver(driver.cuModuleLoadData(ctypes.byref(module), code))
        _check_driver(
            driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode())
        )
        _check_driver(driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared))
        if cluster > _PORTABLE_CLUSTER:
            _check_driver(driver.cuFuncSetAttribute(self._function, _NON_PORTABLE_CLUSTER, 1))
        self.clusters = self._clusters()

    def _clusters(self) -> int:
        """Clusters that the GPU runs at a time."""
        size = (ctypes.c_uint * 16)(self._cluster, 1, 1)
        attribute = _Attribute(_CLUSTER_DIMENSION, 0, size)
        one = (ctypes.c_uint * 3)(self._cluster, 1, 1)
        block = (ctypes.c_uint * 3)(self._threads, 1, 1)
        config = _Config(one, block, self._shared, None, ctypes.pointer(attribute), 1)
        count = ctypes.c_int()
        _check_driver(
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
        return _check_driver(code)

    def _launch(self, clusters: int, argument: ctypes.Structure) -> int:
        stream = torch.cuda.current_stream(self._device).cuda_stream
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
