"""Compilation of the kernel through NVRTC, with a cache on disk.

NVRTC, CUDA's compiler as a library, comes with every torch that has CUDA, so that nothing has to be
built or installed. Its C interface is called by `ctypes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

FILES = ("primitives.cuh", "components.cuh", "sweep.cu")


class Variant(NamedTuple):
    """What a kernel is compiled for: the macros of the source.

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
        return [f"-D{name.upper()}={int(value)}" for name, value in self._asdict().items()]


class CompilerError(RuntimeError):
    """NVRTC is not there, or did not compile the kernel."""


def cubin(variant: Variant, capability: tuple[int, int]) -> bytes:
    """Machine code of a variant for GPUs of one compute capability, from the cache if it is there.

    Raises:
        CompilerError: NVRTC is not there, or did not compile it.
    """
    nvrtc = _nvrtc()
    options = ["-std=c++17", f"--gpu-architecture=sm_{capability[0]}{capability[1]}"]
    options += variant.macros()
    key = hashlib.sha256(repr((_source(), options, _version(nvrtc))).encode()).hexdigest()
    path = cache_folder() / f"{key}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    code = _compile(nvrtc, _source(), options)
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        _write_whole(path, code)
    return code


def cache_folder() -> Path:
    """Folder of compiled kernels: in `$STEELYARD_CACHE`, else in the user's cache folder."""
    chosen = os.environ.get("STEELYARD_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "steelyard" / "kernels"


@cache
def _source() -> str:
    folder = files(__package__ or __name__.rpartition(".")[0])
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in FILES)


def _write_whole(path: Path, code: bytes) -> None:
    """Write through a temporary file: another process may read the cache at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    Path(file.name).replace(path)


@cache
def _nvrtc() -> ctypes.CDLL:
    import torch  # noqa: PLC0415  # only a torch with CUDA gets here

    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    try:
        return ctypes.CDLL(name)  # torch has loaded it, or the system has it
    except OSError as error:
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib  # noqa: PLC0415  # with cuda-bindings
        except ImportError:
            raise CompilerError(f"{name} cannot be loaded: {error}") from error
    try:
        return ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except Exception as error:  # noqa: BLE001  # its own errors, without a common base
        raise CompilerError(f"{name} cannot be loaded: {error}") from error


def _version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _compile(nvrtc: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"sweep.cu", 0, None, None
        ),
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given) != 0:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise CompilerError(f"NVRTC did not compile the kernel: {log}")
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text.raw


def _check(nvrtc: ctypes.CDLL, code: int) -> None:
    if code != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompilerError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(code).decode()}")
